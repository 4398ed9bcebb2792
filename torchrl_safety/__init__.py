"""Safety objectives, replay and networks as TorchRL components."""

__version__ = "0.1.0"
