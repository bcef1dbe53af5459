"""For people who write stores or test with many ranks: the contract suite, a store that fails on cue, ranks."""
