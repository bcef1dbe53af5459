"""Messages between the ranks of a process group; a failure of one rank is raised on all."""
