"""One rank of a data-parallel job: membership, barriers, weight gathering."""
