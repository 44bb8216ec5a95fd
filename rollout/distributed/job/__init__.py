"""One rank of a data-parallel job: its membership in the job, the barriers and the gathering of sharded weights."""
