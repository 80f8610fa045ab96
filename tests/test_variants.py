"""The variants of the block: how they are stated, named, stored and refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import cli
from codegen.module import module_name
from codegen.spec import BlockSpec, SpecError
from codegen.target import target
from tuner.records import Machine, Record
from tuner.space import space
from tuner.trial import OK, Candidate, Outcome
from variants import EACH

USUAL = BlockSpec()


def test_the_usual_block_is_stated_as_before() -> None:
    assert list(USUAL.to_dict()) == ["dim", "heads", "height", "width", "batch", "dtype", "axes", "eps"]
    assert USUAL.variants == {} and USUAL.options == [] and USUAL.inner == 64 and USUAL.name == "d64_h4_32x32_fp32"
    assert BlockSpec(head_dim=16) == USUAL and BlockSpec(head_dim=16).name == USUAL.name, "what follows from dim and heads is no variant"
    assert USUAL.parameters == ("norm_weight", "norm_bias", "qkv_weight", "out_weight", "out_bias")


def test_names_state_every_variant() -> None:
    spec = BlockSpec(head_dim=8, qkv_bias=True, norm="rms")
    assert module_name(spec, "sm_90", False) == "axial_d64_h4_hd8_32x32_qkvbias_rms_fp32_sm90.py"
    specs = [*(BlockSpec(**fields) for fields in EACH.values()), BlockSpec(eps=2.5e-6)]
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names) and all(name.isidentifier() for name in names), names


@pytest.mark.parametrize("fields", EACH.values(), ids=EACH)
def test_a_variant_survives_every_way_of_storing_it(fields: dict[str, Any]) -> None:
    spec = BlockSpec(dim=24, heads=3, **fields)
    assert set(spec.to_dict()) - set(USUAL.to_dict()) == set(fields) - {"eps"}
    assert BlockSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    record = Record.now(Outcome(Candidate(spec, {}), OK), Machine("sm_90"))
    assert record.to_dict()["spec"] == {**json.loads(json.dumps(spec.to_dict()))}
    assert dataclasses.replace(spec, batch=7).variants == spec.variants


def test_a_head_dim_that_follows_from_dim_and_heads_follows_them_again() -> None:
    assert dataclasses.replace(USUAL, dim=40, heads=2).head_dim == 20
    assert dataclasses.replace(BlockSpec(head_dim=8), dim=40, heads=2).head_dim == 8
    assert BlockSpec(dim=65, heads=4, head_dim=8).inner == 32


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"norm": "none", "norm_affine": False}, "norm none leaves nothing for --no-norm-affine"),
        ({"norm": "none", "post_norm": True}, "norm none leaves nothing for --post-norm"),
        ({"norm": "none", "eps": 1e-3}, "norm none leaves nothing for --eps"),
        ({"norm": "batch"}, "norm must be layer, rms or none, not 'batch'"),
        ({"eps": 0.0}, "eps must be between 0 and 1"),
        ({"eps": -1e-5}, "eps must be between 0 and 1"),
        ({"head_dim": 0}, "head_dim must be a whole number from 1"),
        ({"head_dim": 8.0}, "head_dim must be a whole number from 1"),
        ({"dim": 65}, "dim 65 is not divisible by heads 4: choose heads among the divisors of dim, or a head_dim"),
        ({"qkv_bias": 1}, "qkv_bias must be true or false, not 1"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)) as refused:
        BlockSpec(**fields)
    assert "\n" not in str(refused.value)


def test_the_command_line_states_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both commands, and the options that a block's `options` name are the ones it is made from."""
    seen: list[BlockSpec] = []
    monkeypatch.setattr("tuner.session.source_of", lambda spec, *_: seen.append(spec) or type("Source", (), {"text": ""}))
    monkeypatch.setattr("tuner.session.run", lambda request, _: seen.append(request.spec) or 0)
    for fields in EACH.values():
        spec = BlockSpec(**fields)
        for command in ("render", "tune"):
            assert CliRunner().invoke(cli.app, [command, *" ".join(spec.options).split()]).exit_code == 0
            assert seen.pop() == spec


def test_a_study_of_a_variant_is_another_study() -> None:
    digests = {space(BlockSpec(**fields).problem("row"), target("sm_90")).digest for fields in ({}, {"eps": 1e-3})}
    assert len(digests) == 2


def test_committed_files_do_not_change() -> None:
    """What was written before there were variants is what is written now."""
    index = json.loads((Path(__file__).parent.parent / "generated" / "index.json").read_text())
    assert index and all(json.loads(json.dumps(BlockSpec.from_dict(entry["spec"]).to_dict())) == entry["spec"] for entry in index)
