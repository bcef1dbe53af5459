"""Many ranks: how they talk, and how a failure of one reaches all; one process is a world of one."""
