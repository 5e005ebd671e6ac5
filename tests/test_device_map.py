"""Weights on several devices: where each is placed, and that a node is computed where its weights are."""

from dataclasses import replace

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.pretrained import FAMILIES, from_pretrained, source_to_net
from bnet_transformer.pretrained.source import model_to_source, wrap_state_dict
from bnet_transformer.pretrained.weights import dispatch_weights
from tests.huggingface_models import GPT2, MPNET, T5, init_model
from tests.test_families import TABLE

MAP = {"": torch.device("cpu"), "h.1": torch.device("meta")}


def load_split(model, devices):
    """Return a net with weights placed by a device map; `meta`, a device without data, is the second device."""
    source = model_to_source(model, None)
    device_map = {name: torch.device(position) for name, position in devices.items()}
    weights = dispatch_weights(FAMILIES[model.config.model_type], source.weights, device_map)
    return source_to_net(replace(source, weights=weights), "auto")


@pytest.mark.parametrize(("name", "options"), [("GPT2Model", GPT2), ("MPNetModel", MPNET)])
def test_a_node_is_computed_where_its_weights_are(name, options):
    """Values move with the slices to other devices: the first slice is computed here, the second on its device."""
    model = init_model(name, options, torch.float32)
    part = "h.1" if name[0] == "G" else "encoder.layer.1"
    device_map = {"": "cpu", part: "meta", "pooler": "meta", "ln_f": "meta"}
    expected_net, net = from_pretrained(model), load_split(model, device_map)
    assert {value.device.type for value in net.parameters.values()} == {"cpu", "meta"}
    ids, present = torch.randint(2, 13, (2, 5)), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    last = "norm" if name[0] == "G" else "pooled"
    weights, result = net.module().eval().attention_weights(ids, present, want=["x_0", "x_1", "x_2", last])
    expected = expected_net.module().eval()(ids, present, want=["x_0", "x_1", "x_2", last])
    assert [value.device.type for value in result.values()] == ["cpu", "cpu", "meta", "meta"]
    assert all(value.shape == expected[name].shape for name, value in result.items())
    torch.testing.assert_close(result["x_1"], expected["x_1"])
    assert weights["a_1"].is_meta and not weights["a_0"].is_meta
    if name[0] == "G":
        with pytest.raises(bt.BNetError, match="a net on one device; got cpu, meta"):
            load_split(init_model("GPT2LMHeadModel", options), {f"transformer.{part}": "meta", "": "cpu"}).generate([3])
    torch.testing.assert_close(net.sentence([3, 4, 5])["x_1_2"], expected_net.sentence([3, 4, 5])["x_1_2"])


def test_a_device_map_is_respected(tmp_path):
    """Each tensor of a folder is copied to its device once, by the longest matching name."""
    model = init_model("GPT2Model", GPT2, torch.float32)
    model.save_pretrained(tmp_path)
    for device_map in ("cpu", torch.device("cpu"), {"": "cpu"}, {"transformer": "cpu", "h": "cpu", "": "cpu"}):
        net = from_pretrained(tmp_path, device_map=device_map)
        assert net.sentence([3, 4])["norm_1"].equal(from_pretrained(model).sentence([3, 4])["norm_1"])
    weights = dispatch_weights(
        FAMILIES["gpt2"], wrap_state_dict("test", {"h.1.w": torch.ones(2), "h.10.w": torch.ones(2)}), MAP
    )
    assert weights.get_tensor("h.1.w").is_meta and weights.get_tensor("h.10.w") is weights.get_tensor("h.10.w")
    assert not weights.get_tensor("h.10.w").is_meta
    parameters = from_pretrained(tmp_path, device_map="cpu").parameters
    pointers = {parameters[f"W_{role}_0.value"].untyped_storage().data_ptr() for role in "qkv"}
    assert len(pointers) == 1  # three parts of one tensor
    for wrong in ("nowhere", 99, "disk", "meta", {"": "auto"}, {"h": "cpu"}, {}):
        with pytest.raises(bt.BNetError, match="device"):
            from_pretrained(tmp_path, device_map=wrong)
    with pytest.raises(bt.BNetError, match="in memory; got an offloaded tensor"):
        from_pretrained(model.to("meta"))


@pytest.mark.parametrize("name", ["bart", "gpt_neox", "vit"])
def test_a_map_uses_the_module_names_of_transformers(name, tmp_path):
    """For any names in the file (GPT-NeoX's readout, a ViT's slices), the map accepts the name of every module of the
    model, also of one without weights, and of every module of the bare model."""
    model = init_model(*TABLE[name][:2], torch.float32)
    model.save_pretrained(tmp_path)
    family = FAMILIES[model.config.model_type]
    modules = [part for part, module in model.named_modules() if part and not list(module.children())]
    short_names = [part.removeprefix(family.prefix) for part in modules]
    for names in (modules, short_names):
        assert from_pretrained(tmp_path, device_map=dict.fromkeys([*names, ""], "cpu")).parameters
    prefixed = [part for part in modules if part.startswith(family.prefix)]
    last = max(prefixed, key=lambda part: ("1" in part, "ffn" in part))
    wrong = last.replace("1", "7") if "1" in last else f"{last}s"
    with pytest.raises(bt.BNetError, match=r"module of device_map: expected a known name; got .*near matches are "):
        from_pretrained(tmp_path, device_map={"": "cpu", wrong: "cpu"})
    short = load_split(model, {"": "cpu", last.removeprefix(family.prefix): "meta"})
    same = load_split(model, {"": "cpu", last: "meta", family.prefix.rstrip("."): "cpu"})
    devices_by_net = [{k: v.device.type for k, v in net.parameters.items()} for net in (short, same)]
    assert devices_by_net[0] == devices_by_net[1] and set(devices_by_net[0].values()) == {"cpu", "meta"}


def test_auto_is_the_only_device(monkeypatch):
    model = init_model("GPT2Model", GPT2, torch.float32)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert {v.device.type for v in from_pretrained(model, device_map="auto").parameters.values()} == {"cpu"}
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    from bnet_transformer.pretrained import weights as weight_mapping

    assert weight_mapping._get_single_accelerator().type == "meta"
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(bt.BNetError, match="'auto' does not choose among several devices; got 2 meta devices"):
        from_pretrained(model, device_map="auto")

    class Unmovable(torch.Tensor):
        def to(self, *_):
            raise torch.OutOfMemoryError

    device_map = {"": torch.device("cpu")}
    with pytest.raises(bt.BNetError, match="expected enough memory on cpu; got w"):
        dispatch_weights(
            FAMILIES["gpt2"], wrap_state_dict("test", {"w": torch.ones(2).as_subclass(Unmovable)}), device_map
        ).get_tensor("w")


def test_weights_are_brought_to_a_type():
    """`transformers` keeps some weights of a float16 T5 in float32; no net computes in both types."""
    model = init_model("T5ForConditionalGeneration", T5, torch.float32).half()
    for part in (*model.encoder.block, *model.decoder.block):
        part.layer[-1].DenseReluDense.wo.float()
    with pytest.raises(bt.BNetError, match=r"one floating-point dtype; got torch.float16, torch.float32. Use dtype="):
        from_pretrained(model)
    for dtype in (torch.float32, torch.bfloat16):
        net = from_pretrained(model, dtype=dtype, device_map="cpu" if dtype == torch.float32 else None)
        s = net.sentence({"enc": [3, 4], "dec": [0, 5]})
        assert net.network.dtype == dtype and s["dec_x_1_0"].dtype == dtype
    with pytest.raises(bt.BNetError, match=r"dtype: expected a floating-point dtype; got torch.int8"):
        from_pretrained(model, dtype=torch.int8)
