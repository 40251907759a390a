# SPDX-License-Identifier: Apache-2.0
"""Configs: what ships loads, and what is wrong is named."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import replace
from inspect import signature

import pytest

from oktopk import local_steps
from oktopk.lab.runlog.reader import CONFIG_FILE, read_runlog
from oktopk.lab.train.config import Config, make_config, nearest, preset_options, specs
from oktopk.lab.train.config_files import SHIPPED, add_flags, load, shipped, to_toml, with_flags
from oktopk.lab.train.exchange import baseline_warmup, exchange_options
from oktopk.lab.train.run_process import flags
from oktopk.lab.train.setup import log_unused_options, with_known_start
from oktopk.settings import LOCAL_DENSITY, LOCAL_EVERY, WIRE, Settings

PLAIN = {"overshoot": 0.0, "staleness_correction": False, "rescale_with_lr": False}


def test_the_known_configs_are_shipped():
    assert {"quickstart", "lstm_debug", "lstm_extended", "lstm_full", "compact"} <= set(shipped())


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_config_loads_and_holds_only_differences(name):
    assert load(name).name == name
    for key, value in tomllib.loads((SHIPPED / f"{name}.toml").read_text()).items():
        default = specs(load(name).task)[key].default
        assert value != default, f"{key} is the default already"


def test_the_run_of_the_notes():
    config = load("lstm_extended")
    assert (config.workers, config.batch, config.epochs, config.lr) == (8, 8, 10, 0.01)
    assert (config.density, config.method) == (0.02, "oktopk")
    assert (config.warmup_steps, config.ramp_steps) == (128, 0)
    assert (config.options.hidden, config.options.layers, config.options.bidirectional) == (
        800,
        5,
        False,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("densty = 0.1", "unknown key 'densty'; did you mean 'density'"),
        ("density = 2", r"density must be in \(0, 1\], got 2"),
        ("batch = 0", "batch must be at least 1, got 0"),
        ("batch = 2.5", "batch must be a whole number, got 2.5"),
        ("batch = true", "batch must be a whole number, got True"),
        ("optimizer = 'lion'", "optimizer must be one of sgd, adamw, got 'lion'"),
        ("method = 'topk'", "method must be one of dense"),
        ("group_numel = 'large'", "group_numel must be a whole number or auto, got 'large'"),
        ("group_numel = 0", "group_numel must be at least 1, got 0"),
        ("warmup_steps = 'long'", "warmup_steps must be a whole number or auto, got 'long'"),
        ("ramp_steps = 0.5", "ramp_steps must be a whole number or auto, got 0.5"),
        ("density = 'most'", "density must be a number or auto, got 'most'"),
        ("density = 'auto'\nmethod = 'dense'", "density = auto has no effect with dense"),
        ("lr = 'fast'", "lr must be a number, got 'fast'"),
        ("lr = -1", "lr must be positive"),
        ("lr = 0.1 0.2", "toml: "),
        ("overrides = 'max_beta1=1.5'", r"max_beta1 must be in \[0, 1\), or None, got 1.5"),
        ("overrides = 'max_beta1=0.5'", "max_beta1=0.5 is for adamw; optimizer is sgd"),
        ("overrides = 'rescale_with_lr=3'", "rescale_with_lr must be True or False, got 3"),
        ("overrides = 'rescale_with_lr=maybe'", "rescale_with_lr=maybe: Invalid value"),
        ("overrides = 'density=0.3'", "overrides must be like 'overshoot=0.3,max_beta1=0.3' with"),
        ("overrides = 'overshoot'", "got 'overshoot'"),
        ("overrides = 'overshoot=0.1,overshoot=0.2'", "overshoot=0.2: it is there twice"),
        ("delay = -1", "delay must be at least 0, got -1"),
        (
            "method = 'local_steps'\nevery = 4\ndelay = 4",
            "delay must be at most 3 with every = 4, got 4",
        ),
        (
            "method = 'local_steps'\nevery = 4\nfragments = 5",
            "fragments must be at most 4 with every = 4, got 5",
        ),
        ("preset = 'maybe'", "preset must be one of auto, none, got 'maybe'"),
        ("remedies = 'none'", "remedies is now preset; rename it"),
        ("beta1 = 0.3", "beta1 is now max_beta1 in overrides; rename it"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load(str(path))
    assert str(path) in str(caught.value)


def test_a_config_that_is_not_there_names_those_that_are():
    with pytest.raises(ValueError, match="lstm_extended"):
        load("lstm_extnded")


def test_written_and_read_again_it_is_the_same(tmp_path):
    config = make_config(name="a.b-c_1", lr=1e-9, augment=False, data='a "quoted" δ')
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load(str(path)) == config


def test_every_field_is_a_flag_with_help():
    parser = argparse.ArgumentParser()
    add_flags(parser, Config())
    text = parser.format_help()
    for name, spec in specs("speech").items():
        assert f"--{name.replace('_', '-')}" in text
        assert spec.metadata["help"]
    args = parser.parse_args(["--no-augment", "--lr", "0.5", "--name", "x"])
    assert with_flags(Config(), args) == make_config(augment=False, lr=0.5, name="x")


def test_nothing_near_is_no_hint():
    assert nearest("zzz", ["density"]) == ""


@pytest.mark.parametrize(
    ("preset", "overrides", "expected"),
    [
        ("auto", "", {}),
        (
            "auto",
            "max_beta1=0.5, staleness_correction=false",
            {"max_beta1": 0.5, "staleness_correction": False},
        ),
        ("auto", "overshoot=0,rescale_with_lr=true", {"overshoot": 0, "rescale_with_lr": True}),
        ("none", "", PLAIN),
        ("none", "staleness_correction=true", {**PLAIN, "staleness_correction": True}),
    ],
)
def test_the_config_overrides_the_preset(preset, overrides, expected):
    assert preset_options(preset, overrides) == expected


def test_preset_options_without_effect_are_logged(caplog):
    with caplog.at_level("INFO", logger="oktopk"):
        log_unused_options(Config(method="dense", preset="none"))
        assert not caplog.messages
        log_unused_options(Config(method="dense", optimizer="adamw", overrides="max_beta1=0.3"))
    assert caplog.messages == ["max_beta1: without effect, since dense sends everything"]


@pytest.mark.parametrize("size", ["auto", 5000])
def test_the_size_of_groups_is_passed_on(size):
    assert exchange_options(make_config(group_numel=size))["group_numel"] == size
    assert exchange_options(make_config())["group_numel"] == Settings().group_numel


def test_a_density_that_the_run_chooses_is_passed_on():
    chosen = exchange_options(make_config(density="auto", wire="auto"))
    assert (chosen["density"], chosen["wire"]) == ("auto", None)
    assert exchange_options(make_config(density="auto"))["wire"] == WIRE


def test_who_asks_for_local_steps_gets_their_usual_settings():
    usual = {"every": LOCAL_EVERY, "density": LOCAL_DENSITY}
    assert all(signature(local_steps).parameters[name].default == usual[name] for name in usual)
    asked = argparse.Namespace(method="local_steps")
    for config in (make_config(method="local_steps"), with_flags(Config(), asked)):
        assert {name: getattr(config, name) for name in usual} == usual
    with_density = argparse.Namespace(method="local_steps", density=0.3)
    own = with_flags(Config(), with_density)
    assert (own.density, own.every) == (0.3, LOCAL_EVERY)
    assert with_flags(own, asked) == own  # as when a run is resumed by the same command
    words = flags(replace(load("race"), method="local_steps"), "race")
    assert words[words.index("--density") + 1] == str(load("race").density)


def test_reports_read_a_run_with_a_density_that_it_chooses(tmp_path):
    (tmp_path / CONFIG_FILE).write_text('method = "local_steps"\ndensity = "auto"\n')
    runlog = read_runlog(tmp_path)
    assert runlog.config["density"] == "auto"
    assert not any(CONFIG_FILE in problem for problem in runlog.problems)


def test_the_start_is_that_of_attach_and_of_powersgds_documentation_unless_it_is_given():
    auto = exchange_options(make_config())
    assert auto["warmup_steps"] is auto["ramp_steps"] is None  # attach decides by total_steps
    given = make_config(warmup_steps=3, ramp_steps=0)
    assert exchange_options(given) | {"warmup_steps": 3, "ramp_steps": 0} == exchange_options(given)
    assert baseline_warmup(given, 1000) == 3
    assert baseline_warmup(make_config(), 1000) == 100
    assert baseline_warmup(make_config(), 10**6) == 1000  # a target may end a long run early


def test_a_run_is_stored_with_the_numbers_that_auto_became():
    """Resumed for longer, it keeps its start: the length of the run would make another."""
    settings = {"warmup_steps": 5, "schedule": ((3, 0.25), (4, 0.1))}
    known = with_known_start(make_config(), settings)
    assert (known.warmup_steps, known.ramp_steps) == (5, 7)
    given = make_config(warmup_steps=2, ramp_steps=0)
    assert with_known_start(given, settings) == given
    hook = with_known_start(make_config(method="ddp_powersgd_r4"), {"warmup_steps": 9})
    assert (hook.warmup_steps, hook.ramp_steps) == (9, "auto")
