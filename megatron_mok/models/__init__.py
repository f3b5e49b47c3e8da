"""Hyperparameters of known models: one YAML file each, next to this one, which names its sources.

Everything that needs a model's sizes reads them from here: configurations of `compare`, presets of
`bench`, and the launch scripts in `examples/`.
"""

from pathlib import Path

from .config import ModelConfig
from .schema import ConfigError, build, read_yaml

__all__ = ["MODELS", "ConfigError", "ModelConfig", "load_model", "resolve_base"]

_FOLDER = Path(__file__).parent

MODELS = tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))
"""Names of the known models."""


def load_model(name: str) -> ModelConfig:
    """The model of this name. Raises: ConfigError when there is none."""
    model = build(ModelConfig, _tree(name, "model"))
    model.check()
    return model


def resolve_base(tree: object, prefix: str = "") -> object:
    """`tree` with what it leaves out taken from the model that its key `base` names, if any.

    Args:
        tree: a mapping of fields of ModelConfig. Other things are returned as they are.
        prefix: dotted path of the mapping, for errors.
    Raises: ConfigError when there is no such model.
    """
    if not isinstance(tree, dict) or "base" not in tree:
        return tree
    own = {key: value for key, value in tree.items() if key != "base"}
    return {**_tree(tree["base"], f"{prefix}base"), **own}


def _tree(name: object, key: str) -> dict:
    if name not in MODELS:
        raise ConfigError(f"{key}: {name!r} is not known; allowed are {', '.join(MODELS)}")
    return read_yaml(_FOLDER / f"{name}.yaml")
