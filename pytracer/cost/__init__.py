"""What each operator did, forward and backward: times from torch.profiler, FLOPs and bytes by model."""
