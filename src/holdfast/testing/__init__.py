"""For people who write stores: the contract suite, and stores and disks that fail on cue."""
