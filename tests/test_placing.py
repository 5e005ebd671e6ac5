"""Weights on several devices: where each is brought, and that a node is computed there."""

from dataclasses import replace

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.pretrained import from_pretrained, source_to_net
from bnet_transformer.pretrained.placing import Placed
from bnet_transformer.pretrained.source import Held, model_to_source
from tests.hugging import BERT, GPT2, MPNET, random_model

MAP = {"": torch.device("cpu"), "h.1": torch.device("meta")}


def split(model, devices):
    """A net whose weights lie where a map says: `meta`, a device without numbers, stands for another than the CPU."""
    source = model_to_source(model, None)
    places = {name: torch.device(place) for name, place in devices.items()}
    return source_to_net(replace(source, weights=Placed(source.weights, places)), "auto")


@pytest.mark.parametrize(("name", "options"), [("BertModel", BERT), ("GPT2Model", GPT2), ("MPNetModel", MPNET)])
def test_a_node_is_computed_where_its_weights_are(name, options):
    """Values come with the slices to other devices: the first slice is computed here, the second where it lies."""
    model = random_model(name, options, torch.float32)
    part = "h.1" if name[0] == "G" else "encoder.layer.1"
    far = {"": "cpu", part: "meta", "pooler": "meta", "ln_f": "meta"}
    whole, net = from_pretrained(model), split(model, far)
    assert {value.device.type for value in net.parameters.values()} == {"cpu", "meta"}
    ids, present = torch.randint(2, 13, (2, 5)), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    last = "norm" if name[0] == "G" else "pooled"
    readings, found = net.module().eval().readings(ids, present, want=["x_0", "x_1", "x_2", last])
    wanted = whole.module().eval()(ids, present, want=["x_0", "x_1", "x_2", last])
    assert [value.device.type for value in found.values()] == ["cpu", "cpu", "meta", "meta"]
    assert all(value.shape == wanted[name].shape for name, value in found.items())
    torch.testing.assert_close(found["x_1"], wanted["x_1"])
    assert readings["a_1"].is_meta and not readings["a_0"].is_meta
    if name[0] == "G":
        with pytest.raises(bt.BNetError, match="a net on one device; got cpu, meta"):
            split(random_model("GPT2LMHeadModel", options), {f"transformer.{part}": "meta", "": "cpu"}).generate([3])
    torch.testing.assert_close(net.sentence([3, 4, 5])["x_1_2"], whole.sentence([3, 4, 5])["x_1_2"])


def test_a_device_map_is_respected(tmp_path):
    """In a folder each tensor is brought to its device once, at the longest name that fits."""
    model = random_model("GPT2Model", GPT2, torch.float32)
    model.save_pretrained(tmp_path)
    for device_map in ("cpu", torch.device("cpu"), {"": "cpu"}, {"transformer": "cpu", "h": "cpu", "": "cpu"}):
        net = from_pretrained(tmp_path, device_map=device_map)
        assert net.sentence([3, 4])["norm_1"].equal(from_pretrained(model).sentence([3, 4])["norm_1"])
    brought = Placed(Held("test", {"h.1.w": torch.ones(2), "h.10.w": torch.ones(2)}), MAP)
    assert brought.tensor("h.1.w").is_meta and brought.tensor("h.10.w") is brought.tensor("h.10.w")
    assert not brought.tensor("h.10.w").is_meta
    shared = from_pretrained(tmp_path, device_map="cpu").parameters
    one = {shared[f"W_{role}_0.value"].untyped_storage().data_ptr() for role in "qkv"}
    assert len(one) == 1  # three parts of one tensor
    for wrong in ("nowhere", 99, "disk", "meta", "auto", True, {"h": "cpu"}, {1: "cpu"}, {}, 3.5):
        with pytest.raises(bt.BNetError, match="device_map"):
            from_pretrained(tmp_path, device_map=wrong)
    with pytest.raises(bt.BNetError, match="in memory; got one that is offloaded"):
        from_pretrained(model.to("meta"))
