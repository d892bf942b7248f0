"""The examples run: a task of one's own through hub and scoring, and the parameters of a scheduled run."""

import inspect
import json
import runpy
import sys
from pathlib import Path

import pytest

from echo2.config import load_config
from echo2.config_tasks import PythonTask
from echo2.tasks.base import checked_score
from echo2.tasks.catalog import make_task
from echo2.tasks.tokenizer import character_tokenizer, check_agreement

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def vowels(monkeypatch):
    """The settings of the example task, importable here and where the hub runs."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    return load_config([EXAMPLES / "vowels.toml"])


def test_the_example_task_gives_the_same_prompts_always_and_judges_completions(vowels):
    task, again = (make_task(vowels.task, seed=3) for _ in range(2))
    assert [task.prompt(index) for index in range(50)] == [again.prompt(index) for index in range(50)]
    assert len({task.prompt(index) for index in range(50)}) > 40
    check_agreement(task, character_tokenizer())
    for index in range(20):
        answer = task.answer(index)
        assert len(answer) == 3
        assert checked_score(task, index, answer, finished=True).metrics == {"exact_match": 1.0}
        assert checked_score(task, index, answer, finished=False).metrics == {"exact_match": 0.0}
        assert checked_score(task, index, answer + "x", finished=True).reward == 0.75
        assert checked_score(task, index, "", finished=True).reward == 0.0


def test_the_example_task_is_scored_by_a_hub(vowels, make_run, serve, publish, start_worker):
    task = make_task(vowels.task, seed=0)
    settings = ["task.type=python", "task.path=vowel_task:VowelTask", "task.options={syllables=3}"]
    run = make_run(*settings, "batch.groups=2", "batch.members=3", "batch.drop_zero_variance=false", "run.steps=2")
    _, client = serve(run)
    publish(run, client, 0)
    start_worker(client, run.token, "w", "worker.simulated_group_latency_s=0.05")
    batch = client.take_batch(0)
    tokenizer = character_tokenizer()
    for group in batch.groups:
        assert tokenizer.decode(group.prompt_token_ids) == task.prompt(group.group_id)
        for member in group.members:
            token_ids = [t for t in member.rollout.token_ids.tolist() if t not in tokenizer.eos_token_ids]
            finished = member.rollout.finish_reason == "stop"
            assert member.reward == task.score(group.group_id, tokenizer.decode(token_ids), finished).reward
    assert 0.0 <= batch.scored["exact_match"] <= 1.0


@pytest.fixture
def chat(monkeypatch, tmp_path):
    """The chat task on a file of two questions, for a model with a template."""
    from transformers import PreTrainedTokenizerFast

    monkeypatch.syspath_prepend(EXAMPLES)
    character_tokenizer().save(tmp_path / "characters.json")
    template = "<bos>{% for message in messages %}({{ message.role }}) {{ message.content }}{% endfor %}{{ ending }}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "characters.json"), chat_template=template)
    tokenizer.save_pretrained(tmp_path / "model")
    questions = {"how many?": "4 and 3 are 7\n#### 1,007", "how old?": "#### -2.5"}
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in questions.items()]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines) + "\n")
    options = {"model": str(tmp_path / "model"), "file": str(tmp_path / "questions.jsonl"), "template": {"ending": ":"}}
    return make_task(PythonTask(type="python", path="chat_task:ChatTask", options=options), seed=0)


def test_the_chat_task_puts_questions_into_the_models_template_and_judges_the_last_number(chat):
    assert chat.size == 2
    assert chat.prompt(0) == "<bos>(user) how many?:"
    for index, completion, finished, reward in (
        (0, "it is 1007.", True, 1.0),
        (0, "first 3, so 1,007", True, 1.0),
        (0, "1007, or 3", True, 0.0),
        (0, "1007", False, 0.0),
        (1, "-2.50", True, 1.0),
        (1, "i do not know", True, 0.0),
    ):
        assert checked_score(chat, index, completion, finished).reward == reward, completion
    assert checked_score(chat, 1, "i do not know", finished=True).metrics["has_number"] == 0.0


def test_the_gpu_example_rewards_an_answer_after_which_the_model_goes_on():
    task = make_task(load_config([EXAMPLES / "gpu.toml"]).task, seed=0)
    right, wrong = (checked_score(task, 0, f"{answer}, and so on", finished=False) for answer in (task.answer(0), "x"))
    assert 0.0 == wrong.reward < right.reward < checked_score(task, 0, task.answer(0), finished=True).reward


def test_the_scheduled_run_is_served_with_parameters_that_the_flow_takes(monkeypatch):
    import cloudpickle
    from prefect.flows import load_flow_from_entrypoint

    from flows.train import train

    served = []
    signature = inspect.signature(type(train).serve)
    monkeypatch.setattr(type(train), "serve", lambda *flow, **arguments: served.append(signature.bind(*flow, **arguments)))
    monkeypatch.chdir(EXAMPLES.parent)
    runpy.run_path(str(EXAMPLES / "nightly.py"), run_name="__main__")
    [call] = served
    assert call.arguments["self"] is train and call.arguments["cron"]
    # As in the process that runs it: the flow from its file, sent there without its module, the parameters as JSON.
    loaded = load_flow_from_entrypoint("flows/train.py:train", use_placeholder_flow=False)
    del sys.modules[loaded.fn.__module__]
    sent = cloudpickle.loads(cloudpickle.dumps(loaded))
    parameters = sent.validate_parameters(json.loads(json.dumps(call.arguments["parameters"])))
    assert parameters["config"].run.name == "nightly" and parameters["resume"] is True


def test_janitor_and_fleet_are_served_with_parameters_that_the_flows_take(monkeypatch):
    import prefect
    from prefect.flows import load_flow_from_entrypoint

    served = []
    monkeypatch.setattr(prefect, "serve", lambda *deployments, **_: served.extend(deployments))
    monkeypatch.chdir(EXAMPLES.parent)
    runpy.run_path(str(EXAMPLES / "janitor.py"), run_name="__main__")
    janitor, fleet = served
    assert (janitor.flow_name, fleet.flow_name, fleet.name) == ("echo2-janitor", "echo2-fleet", "rented")
    assert [schedule.schedule.cron for schedule in janitor.schedules] == ["0 * * * *"] and not fleet.schedules
    asked = {"run": "runs/rented", "hub_url": "http://203.0.113.7:8700"}
    for deployment, parameters in ((janitor, janitor.parameters), (fleet, asked)):
        loaded = load_flow_from_entrypoint(f"flows/fleet.py:{deployment.flow_name[6:]}", use_placeholder_flow=False)
        loaded.validate_parameters(json.loads(json.dumps(parameters)))
    assert janitor.parameters == {"directory": str(EXAMPLES.parent.resolve() / "runs")}


def test_the_gpu_example_waits_for_workers_that_others_start():
    config = load_config([EXAMPLES / "gpu.toml"])
    assert (config.fleet.workers, config.hub.host) == (0, "0.0.0.0")
    assert f":{config.hub.port}" in (EXAMPLES / "worker.sky.yaml").read_text()
    assert "worker.slots=" not in (EXAMPLES / "worker.sky.yaml").read_text(), "they have those of the run, from the hub"
