"""Sweeps against the patching functions of TransformerLens, on the same random GPT-2."""

import warnings

import pytest
import torch

import bnet_transformer as bt
from bnet_transformer.pretrained import from_pretrained
from tests.huggingface_models import GPT2, T, init_model

CLEAN = torch.tensor([[3, 4, 5, 6, 7], [1, 2, 3, 4, 5], [9, 9, 8, 2, 7]])
CORRUPT = torch.tensor([[3, 8, 5, 6, 7], [6, 7, 8, 9, 10], [9, 9, 1, 1, 7]])
FIRST, SECOND = 4, 11
HEAD_AXES, ENTRY_AXES = ("slice", "head"), ("slice", "head", "word", "read")
# Functions of TransformerLens -> our at= and over=, and their order of our axes.
SWEEPS = {
    "resid_pre": ("x", None, (0, 1)),
    "resid_mid": ("add1", None, (0, 1)),
    "attn_out": ("mix", None, (0, 1)),
    "mlp_out": ("ffn", None, (0, 1)),
    "attn_head_out_by_pos": ("a", None, (0, 2, 1)),
    "attn_head_q_by_pos": ("q", None, (0, 2, 1)),
    "attn_head_k_by_pos": ("k", None, (0, 2, 1)),
    "attn_head_v_by_pos": ("v", None, (0, 2, 1)),
    "attn_head_out_all_pos": ("a", HEAD_AXES, (0, 1)),
    "attn_head_q_all_pos": ("q", HEAD_AXES, (0, 1)),
    "attn_head_k_all_pos": ("k", HEAD_AXES, (0, 1)),
    "attn_head_v_all_pos": ("v", HEAD_AXES, (0, 1)),
    "attn_head_pattern_all_pos": ("j", HEAD_AXES, (0, 1)),
    "attn_head_pattern_by_pos": ("j", None, (0, 1, 2)),
    "attn_head_pattern_dest_src_pos": ("j", ENTRY_AXES, (0, 1, 2, 3)),
}
UNSWEPT = {"attn_head_all_pos_every", "attn_head_by_pos_every", "block_every", "direct_path", "direct_path_all_sources"}


def model():
    """A random GPT-2, with weights large enough that a patch has an effect."""
    net = init_model("GPT2LMHeadModel", {**GPT2, "n_layer": 2}, torch.float64)
    for parameter in net.parameters():
        parameter.data.mul_(2.5)
    return net


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """A net, and a TransformerBridge of the same model with the patching functions."""
    pytest.importorskip("transformer_lens", reason='the oracle of sweeps: pip install "bnet-transformer[peers]"')
    folder = tmp_path_factory.mktemp("bridge")
    model().save_pretrained(folder)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        from tokenizers import Tokenizer, models
        from transformer_lens import patching
        from transformer_lens.model_bridge import TransformerBridge

        words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(13)}, unk_token="w12"))
        special = dict.fromkeys(("pad_token", "bos_token", "eos_token"), "w0")
        T.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w12", **special).save_pretrained(folder)
        tokenizer = T.AutoTokenizer.from_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(
            str(folder), hf_model=model(), tokenizer=tokenizer, device="cpu", dtype=torch.float64
        )
        cache = bridge.run_with_cache(CLEAN)[1]
    patching.tqdm = lambda cells: cells
    return from_pretrained(model()), bridge, cache, patching


def difference(logits):
    """Return the metric of TransformerLens: a difference of logits at the last word, for each prompt."""
    return logits[:, -1, FIRST] - logits[:, -1, SECOND]


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_is_what_transformer_lens_patches(peers, name):
    net, bridge, cache, patching = peers
    at, over, order = SWEEPS[name]
    clean, corrupt = ([net.sentence(ids.tolist()) for ids in side] for side in (CLEAN, CORRUPT))
    with torch.no_grad():
        patch = getattr(patching, f"get_act_patch_{name}")
        peer = patch(bridge, CORRUPT, cache, difference, reduce="none", baseline=True)
    result = bt.sweep(clean, corrupt, at=at, metric={"y_4": (FIRST, SECOND)}, over=over)
    actual = result.outcomes[:2].permute(*order, len(order))  # resid_pre ends before the last state
    if over == ENTRY_AXES:  # TransformerLens sets entries that the mask removes: no effect
        assert torch.equal(
            actual.isnan(), (torch.arange(5) > torch.arange(5)[:, None])[None, None, ..., None].expand(actual.shape)
        )
        actual = torch.where(actual.isnan(), result.corrupt, actual)
    tolerances = {"rtol": 1e-4, "atol": 1e-4, "check_dtype": False}
    torch.testing.assert_close(actual, peer.values, **tolerances)
    torch.testing.assert_close(result.corrupt, peer.baseline, **tolerances)
    torch.testing.assert_close(result.clean, difference(bridge(CLEAN)).detach(), **tolerances)
    assert float((actual - result.corrupt).abs().max()) > 0.1


def test_every_patching_function_has_a_sweep(peers):
    peer = {name.removeprefix("get_act_patch_") for name in dir(peers[-1]) if name.startswith("get_act_patch_")}
    assert peer == set(SWEEPS) | UNSWEPT


def test_to_first_order_it_is_their_attribution_patching(peers):
    from transformer_lens.tools.analysis.attribution_patching import attribution_patch

    net, bridge, *_ = peers
    bridge.eval()
    peer = attribution_patch(bridge, CLEAN, CORRUPT, lambda logits: difference(logits).sum()).node_scores
    clean, corrupt = ([net.sentence(ids.tolist()) for ids in side] for side in (CLEAN, CORRUPT))
    options = {"metric": {"y_4": (FIRST, SECOND)}, "method": bt.Gradient()}
    actual = {at: bt.sweep(clean, corrupt, at=at, **options).values for at in ("x", "a", "ffn")}
    kinds = {node.kind for node in peer}
    assert kinds == {"attn_head_out", "mlp_out", "embed"}
    tolerances = {"rtol": 1e-4, "atol": 1e-4}
    for node, score in peer.items():
        if node.kind == "attn_head_out":
            result = actual["a"][node.layer, node.head, node.position]
        elif node.kind == "mlp_out":
            result = actual["ffn"][node.layer, node.position]
        else:
            result = actual["x"][0, node.position]
        torch.testing.assert_close(float(result), score, **tolerances)
    assert max(map(abs, peer.values())) > 0.1
