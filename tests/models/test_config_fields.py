"""A config that is wrong is refused by its field."""

import copy
import json

import pytest
from driver import GOLDEN

from sparkjax.models import registry
from sparkjax.models.config import ConfigReader, UnsupportedConfig

FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if (path / "config.json").exists())


def fields(values: dict, path: tuple[str, ...] = ()):
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from fields(value, (*path, key))


@pytest.mark.parametrize("family", FAMILIES)
def test_any_value_of_any_field_is_read_or_refused(family: str):
    values = json.loads((GOLDEN / family / "config.json").read_text())
    failed = []
    for path in fields(values):
        for wrong in (0, -1, 1.5, "x", True, None, [], {}):
            changed = copy.deepcopy(values)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = wrong
            try:
                registry.family_of(changed).read_config(changed)
            except UnsupportedConfig as error:
                assert "config.json" in str(error) or "model_type" in str(error), (path, wrong)
            except Exception as error:
                failed.append((".".join(path), wrong, repr(error)))
    assert not failed


def test_sizes_are_counted_from_one():
    reader = ConfigReader({"heads": 0, "none": -1})
    with pytest.raises(UnsupportedConfig, match="heads is 0; this model supports 1 and more"):
        reader.read("heads", int)
    with pytest.raises(UnsupportedConfig, match="none is -1; this model supports 0 and more"):
        reader.read("none", int, 4)
    assert reader.read("heads", int, 4) == 0
    assert reader.read("heads", int, least=0) == 0
