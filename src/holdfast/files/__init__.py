"""Files as snapshots: kept, restored, and cut where their tensors are. Does not need torch."""
