from tests.e2e.fixtures import (
    cramped,
    default_model,
    either,
    fake,
    one_fake,
    one_tiny,
    scripted,
    servers,
    tiny,
    tiny_folder,
)

__all__ = [
    "cramped",
    "default_model",
    "either",
    "fake",
    "one_fake",
    "one_tiny",
    "scripted",
    "servers",
    "tiny",
    "tiny_folder",
]
