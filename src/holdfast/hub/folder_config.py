"""The config class of `"model_type": "holdfast"`: what `AutoConfig` asks for the config of a changed model.

Apart from `own_class`, whose imports load the registry of quantisers and so would import that file a second time.
"""

from collections.abc import Mapping
from typing import Any

from holdfast.hub.changed import changed_config
from holdfast.hub.config_file import MODEL_TYPE, config_class, family_values
from holdfast.hub.model_size import require_sane_numbers


class FolderConfig:
    """Mixed into `PreTrainedConfig`: `from_dict` returns the family's config with the changes."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> Any:
        name = options.get("name_or_path") or "this folder"
        require_sane_numbers(config_dict, name)
        values = family_values(config_dict, name)
        return changed_config(config_class(values.get("model_type"), name)).from_dict(values, **options)
