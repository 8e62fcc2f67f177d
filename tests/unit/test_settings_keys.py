"""How many keys a run's file has, that each says what it means, and that values of another kind are refused by name."""

from pathlib import Path

import pytest

from rolecall.errors import ConfigError
from rolecall.settings import RunSettings, load_settings
from tests.twins.launched import write_light_config
from tools.settings_keys import leaves

MAX_KEYS = 368
"""249 when they were last cut (ADR 44); the rest is room for new capabilities, not for new knobs of old ones. The 300th
names the parser of tool calls, the 301st where agents call the policy, the 302nd what chat templates are given, the
303rd and 304th whom an environment outside the run trusts and is trusted by, the 305th how often a lost episode is
begun again, the 306th how long an agent's row may be, the 307th whether a run that is made again ends in the same
weights, the 308th whether only what changed travels to the rollouts, the 309th and 310th how much of an environment's
answer the policy reads, and which part, the 311th whether training goes on beside an evaluation, the 312th whether
whole parameters stay from pass to pass, the 313th how many stages a rollout's layers are split into, the 314th
how many steps a critic learns before its policy does, the 315th how tests call a function of a program, the 316th what
adapters begin as, the 317th whether layers are compiled, the 318th to 321st the critic's adapters, as the actor's, the
322nd and 323rd a function for rows of data sets in another form, the 324th whether a run is evaluated before its first
step, the 325th the chat template of a base model that has none, the 326th the options of a scorer's function, up to the
331st where a server runs programs, whom it trusts and is trusted by, how many it runs at a time and what it calls their
language, the 332nd how many calls a scorer elsewhere is given at a time, the 333rd which field of a row holds images,
the 334th whether what sees them is trained, the 335th how many an environment shows, up to the 345th the critic's
own optimizer, the 346th a run's length in epochs, the 347th whether a scorer's function gets images, the 348th and
349th how many rows of a large file are used, the 350th how hard a token may pull towards a teacher, the 351st which
component of the reward filters read, the 352nd whether importance weights are divided by their mean, the 353rd
whether a reference leaves shared devices between its passes, up to the 362nd the servers that the run starts for its
scorers, the 363rd which prompts an environment plays, and the 364th whether routers of experts are trained.
"""


def test_the_keys_are_few() -> None:
    assert len(list(leaves(RunSettings))) < MAX_KEYS


def test_every_key_is_documented() -> None:
    assert not [path for path, docstring in leaves(RunSettings) if not docstring]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("algorithm.groups_per_batch=true", "algorithm: groups_per_batch: true and false are no numbers; write a"),
        ("sampling.temperature=false", "sampling: temperature: true and false are no numbers; write a number"),
        ("actor.devices=[true]", "actor: devices: true and false are no numbers; write a number"),
        ("run.dir=true", "run.dir: True is no path; write one, in quotes where YAML reads something else"),
        ("run.dir=[a]", "run.dir: ['a'] is no path; write one, in quotes where YAML reads something else"),
        ("run.dir=0012", "run.dir: 10 is no path; write one, in quotes where YAML reads something else"),
        ("run.dir=1.10", "run.dir: 1.1 is no path; write one, in quotes"),
        ("run.dir=2026-11-26 10:00:00Z", "is no path; write one, in quotes"),
        ("data.train=[a.jsonl, 7]", "data.train: 7 is no path; write one, in quotes"),
        ("run.checkpoint_url=7", "run.checkpoint_url: 7 is no path; write one, in quotes"),
        ("run.dir=$HOME/x", "run.dir: $HOME in '$HOME/x' is not replaced by anything; write the folder in full"),
        ("model.path=/data/${USER}/x", "model.path: ${USER} in '/data/${USER}/x' is not replaced by anything"),
        ("data.system_prompt=# Answer in digits", "data.system_prompt=# Answer in digits': # begins a comment"),
        ("data.system_prompt=Answer # in digits", "data.system_prompt=Answer # in digits': # begins a comment"),
        ("evaluation.sets={a: {path: b, path: c}}", "path is there twice"),
        ("run.checkpoint_url=''", "run.checkpoint_url: it is empty; name a folder or a URL, or leave it out"),
        ("run.checkpoint_url=true", "run.checkpoint_url: True is no path; write one"),
        ("run.dir=~nobody-of-that-name/x", "run.dir: '~nobody-of-that-name/x' begins with ~ and a user who is not kn"),
        ("run.dir=" + "a" * 256, "run.dir: a name of 256 bytes stands in the path, and a file system takes 255; short"),
        ("data.train=new/" + "ä" * 128 + "/x", "data.train: a name of 256 bytes stands in the path"),
        ("run.checkpoint_url=" + "a" * 256, "run.checkpoint_url: a name of 256 bytes stands in the path"),
        ("sampling.num_responses=1025", "sampling.num_responses: Input should be less than or equal to 1024"),
        (
            "evaluation.sets={a: {path: b, num_responses: 1025}}",
            "evaluation.sets.a.num_responses: Input should be less than or equal to 1024",
        ),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(tmp_path: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(write_light_config(tmp_path), [override])
    assert told in refused.value.message


@pytest.mark.parametrize("temperature", ["0.005", "2.5", ".nan", "-1"])
def test_a_temperature_is_one_that_vllm_samples_at(tmp_path: Path, temperature: str) -> None:
    def run(setting: str, value: str) -> RunSettings:
        return load_settings(write_light_config(tmp_path), [setting.format(value)])

    held = "evaluation.sets={{held: {{path: held.jsonl, temperature: {}}}}}"
    for setting in ("sampling.temperature={}", held):
        with pytest.raises(ConfigError, match="temperature"):
            run(setting, temperature)
        assert run(setting, "0.01"), "the limits are allowed"
        assert run(setting, "2")
    with pytest.raises(ConfigError, match=r"sampling.temperature: .* greater than or equal to 0.01"):
        run("sampling.temperature={}", "0")
    assert run(held, "0").evaluation.sets["held"].temperature == 0


@pytest.mark.parametrize(
    ("written", "name"), [("'7'", "7"), ("'0012'", "0012"), ('"1.10"', "1.10"), ("2026-11-26", "2026-11-26")]
)
def test_a_path_may_look_like_a_date_and_in_quotes_like_a_number(tmp_path: Path, written: str, name: str) -> None:
    run = load_settings(write_light_config(tmp_path), [f"run.dir={written}", f"run.checkpoint_url={written}"]).run
    assert (run.dir, run.checkpoint_url) == (tmp_path / name, str(tmp_path / name))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("'# hi'", "# hi"),
        ("C# or F#", "C# or F#"),
        ("  hi there  ", "hi there"),
        ("null", None),
        ("~", None),
        ("", None),
        ("|\n  two\n  lines", "two\nlines"),
        ("'two\n\n  lines' ", "two\nlines"),
    ],
)
def test_an_override_is_read_as_it_is_written(tmp_path: Path, written: str, read: str | None) -> None:
    assert load_settings(write_light_config(tmp_path), [f"data.system_prompt={written}"]).data.system_prompt == read


def test_where_a_truth_is_wanted_it_is_taken(tmp_path: Path) -> None:
    overrides = ["data.shuffle=false", "run.deterministic=true", "actor.parallel.keep_gathered=true"]
    load_settings(write_light_config(tmp_path), overrides)
