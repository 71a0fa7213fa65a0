"""Model configurations from strangers: checked as data, before Keras makes an object of any of it.

Keras finds a class by module path or by registered name. A bundle may use only names that cannot reach other code:
what is registered with `keras.saving.register_keras_serializable` (mmattn's own layers are), what the caller hands in
as `custom_objects`, and the Keras classes listed here, none of which runs code from its configuration or opens a
file.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from typing import Any

import keras
from keras.src.backend.common import global_state

_LAYERS = """
Activation Add Average AveragePooling1D AveragePooling2D BatchNormalization Bidirectional CenterCrop Concatenate
Conv1D Conv2D Conv2DTranspose Cropping1D Cropping2D Dense DepthwiseConv1D DepthwiseConv2D Dot Dropout ELU EinsumDense
Embedding Flatten GRU GRUCell GaussianDropout GaussianNoise GlobalAveragePooling1D GlobalAveragePooling2D
GlobalMaxPooling1D GlobalMaxPooling2D GroupNormalization GroupQueryAttention Identity InputLayer LSTM LSTMCell
LayerNormalization LeakyReLU Masking MaxPooling1D MaxPooling2D Maximum Minimum MultiHeadAttention Multiply
Normalization PReLU Permute RMSNormalization RNN ReLU RepeatVector Rescaling Reshape Resizing ReversibleEmbedding
SeparableConv1D SeparableConv2D SimpleRNN SimpleRNNCell Softmax SpatialDropout1D SpatialDropout2D StackedRNNCells
Subtract TimeDistributed UnitNormalization UpSampling1D UpSampling2D ZeroPadding1D ZeroPadding2D
"""
KERAS_CLASSES = frozenset(
    {("keras.layers", name) for name in _LAYERS.split()}
    | {
        (f"keras.{module.__name__.rpartition('.')[2]}", name)
        for module in (keras.initializers, keras.regularizers, keras.constraints)
        for name, value in vars(module).items()
        if isinstance(value, type)
    }
    | {("keras", "DTypePolicy"), ("keras", "Sequential"), ("keras", "Model")}
)
_NODE_KEYS = {"module", "class_name", "config", "registered_name"}
_GRAPH_KEYS = {"name", "inbound_nodes"}  # what a functional model notes beside each of its layers
_FUNCTIONAL_KEYS = {"layers", "input_layers", "output_layers"}


class ConfigError(ValueError):
    """A configuration that names something it may not. The message begins with the place in the configuration."""


def clean(config: Any) -> Any:
    """The result of `keras.saving.serialize_keras_object` in the form that a bundle stores.

    Module paths of registered classes, build and compile notes are left out, tuples become lists, and a functional
    model is called keras.Model instead of by its private path.
    """
    if isinstance(config, (list, tuple)):
        return [clean(item) for item in config]
    if not isinstance(config, dict):
        return config
    if "class_name" not in config or "config" not in config:
        return {str(key): clean(value) for key, value in config.items()}
    node = {key: clean(value) for key, value in config.items() if key in _NODE_KEYS | _GRAPH_KEYS}
    node = {"module": None, "registered_name": None} | node
    if node["class_name"] == "Functional" and str(node.get("module")).startswith("keras."):
        return node | {"module": "keras", "class_name": "Model", "registered_name": None}
    if node["class_name"] == "function" and node.get("module") in ("builtins", "keras.activations"):
        return node
    if node.get("registered_name") is not None:
        node["module"] = None
    return node


def check(config: Any, where: str = "model", custom_objects: Mapping[str, Any] | None = None, depth: int = 0) -> None:
    """Refuses whatever Keras could turn into foreign code. Instantiates nothing.

    Args:
        config: nested dicts, lists and plain values, as read from JSON.
        where: the place in the file, for the messages.
        custom_objects: further classes by registered name, as Keras takes them.

    Raises:
        ConfigError: with the place, the name and the rule.

    >>> check({"class_name": "Dense", "module": "keras.layers", "config": {"units": 3}, "registered_name": None})
    >>> check({"class_name": "system", "module": "os", "config": {}, "registered_name": None})
    Traceback (most recent call last):
    ...
    mmattn.safe_config.ConfigError: model: 'os.system' is named by a module path; only registered names and common
    keras.layers are allowed
    """
    if depth > 100:
        raise ConfigError(f"{where[:200]}: nested deeper than 100 levels")
    if isinstance(config, list):
        for index, item in enumerate(config):
            check(item, f"{where}[{index}]", custom_objects, depth + 1)
    elif isinstance(config, dict):
        if "class_name" in config or "registered_name" in config:
            _check_node(config, where, custom_objects or {})
        for key, value in config.items():
            check(value, f"{where}.{key}", custom_objects, depth + 1)
    elif config is not None and not isinstance(config, (str, int, float, bool)):
        raise ConfigError(f"{where}: a {type(config).__name__} is not plain data")


def _check_node(node: dict[str, Any], where: str, custom_objects: Mapping[str, Any]) -> None:
    name, module, registered = node.get("class_name"), node.get("module"), node.get("registered_name")
    if not isinstance(name, str) or not node.keys() >= _NODE_KEYS:
        raise ConfigError(
            f"{where}: an object needs class_name, config, module and registered_name, it has {sorted(node)}"
        )
    if isinstance(node["config"], dict) and isinstance(node["config"].get("weights"), str):
        raise ConfigError(f"{where}: {name!r} wants weights from {node['config']['weights']!r}; a bundle has its own")
    if surplus := node.keys() - _NODE_KEYS - _GRAPH_KEYS:
        raise ConfigError(
            f"{where}: {name!r} carries {', '.join(sorted(map(repr, surplus)))}, which a bundle may not have"
        )
    if name == "__keras_tensor__" and module is None and registered is None:
        return
    if name.startswith("__") or (name == "Lambda" and registered is None):
        raise ConfigError(
            f"{where}: {name!r} carries code (a Lambda or a special Keras node); only named classes are allowed"
        )
    if name == "function":
        _check_function(node, where, custom_objects)
    elif registered is not None:
        if module is not None:
            raise ConfigError(f"{where}: {registered!r} has the module path {module!r} beside its registered name")
        found = _registered(registered, where, custom_objects)
        if not isinstance(found, type) or name != registered.rpartition(">")[2]:
            raise ConfigError(f"{where}: {registered!r} is not the registered class {name!r}")
    elif module is None:
        raise ConfigError(f"{where}: {name!r} has neither a registered name nor a module")
    elif (module, name) not in KERAS_CLASSES:
        raise ConfigError(
            f"{where}: '{module}.{name}' is named by a module path; only registered names and common keras.layers "
            "are allowed"
        )
    elif (module, name) == ("keras", "Model") and not (
        isinstance(node["config"], dict) and node["config"].keys() >= _FUNCTIONAL_KEYS
    ):
        raise ConfigError(f"{where}: 'keras.Model' is not a functional model (layers, input_layers, output_layers)")


def _check_function(node: dict[str, Any], where: str, custom_objects: Mapping[str, Any]) -> None:
    name, module = node["config"], node.get("module")
    if (
        module in ("builtins", "keras.activations")
        and isinstance(name, str)
        and callable(getattr(keras.activations, name, None))
    ):
        return
    if module is not None or name != node.get("registered_name"):
        raise ConfigError(
            f"{where}: the function {name!r} of {module!r} is neither a keras activation nor a registered function"
        )
    _registered(name, where, custom_objects)


def _registered(name: Any, where: str, custom_objects: Mapping[str, Any]) -> Any:
    found = None
    if isinstance(name, str):
        found = custom_objects.get(name) or keras.saving.get_registered_object(name)
    if found is None:
        raise ConfigError(
            f"{where}: nothing is registered with Keras as {name!r}. If it is yours, import its module "
            "(register_keras_serializable) before loading, or pass custom_objects"
        )
    return found


def in_float32(config: Any) -> Any:
    """The configuration with float32 in place of every mixed-precision policy, so that it runs on all hardware."""
    if isinstance(config, list):
        return [in_float32(item) for item in config]
    if not isinstance(config, dict):
        return config
    if config.get("class_name") == "DTypePolicy" and str(config["config"].get("name")).startswith("mixed_"):
        return {**config, "config": {**config["config"], "name": "float32"}}
    mixed = {key for key, value in config.items() if key == "dtype" and str(value).startswith("mixed_")}
    return {key: "float32" if key in mixed else in_float32(value) for key, value in config.items()}


def build(
    config: dict[str, Any], shapes: Any, custom_objects: Mapping[str, Any] | None = None, most: int | None = None
) -> Any:
    """`check`, then the model itself with its variables, their values still random.

    The variables get their memory only after they were counted. Layers without a name of their own get the same one
    each time, so that the variables' paths don't depend on what else this process has made.

    Args:
        shapes: of the model's inputs, as its `build` takes them.
        most: how many numbers the model's variables may hold.

    Raises:
        ConfigError: also for arguments that the classes refuse, and for a model that is too big.
    """
    check(config, "model", custom_objects)
    ready = False
    names = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", None)
    try:
        with keras.StatelessScope(initialize_variables=False):
            model = keras.saving.deserialize_keras_object(
                copy.deepcopy(config), custom_objects=dict(custom_objects or {})
            )
            if not model.built:
                model.build(shapes)
            size = sum(math.prod(variable.shape) for variable in model.weights)
        if most is not None and size > most:
            raise ConfigError(f"model: its variables hold {size} numbers, the weights file {most}")
        ready = True
    except ConfigError:
        raise
    except Exception as error:
        said = " ".join(re.sub(r"\x1b\[\d*m", "", str(error)).split())  # Keras writes bold type into messages
        raise ConfigError(f"model: its classes refuse it: {said[:500]}") from error
    finally:
        global_state.set_global_attribute("object_name_uids", names)
        if not ready:
            global_state.set_global_attribute("uninitialized_variables", [])  # else Keras would allocate them later
    with keras.StatelessScope():
        pass  # on leaving it, Keras makes the values of the variables that are waiting
    return model
