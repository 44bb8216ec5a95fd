"""What examples import: a nursery of this module forks processes that begin with it, which takes seconds."""

import rollout.engine.engine
import rollout.manager.manager
import rollout.server.server  # noqa: F401
