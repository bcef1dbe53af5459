"""For people who write stores or test with many ranks: the contract suite, stores and disks that fail on cue, ranks."""
