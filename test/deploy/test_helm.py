"""The chart of deploy/helm: its parts name each other rightly with any values."""

import re
from typing import Any

import helm_python
import pytest
import yaml

from deploy.check import DEPLOY
from deploy.cluster.haproxy import SERVERS


def rendered(**values: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """The chart's objects by their kinds and names."""
    texts = (
        helm_python.Chart.load(str(DEPLOY / "helm")).render(values, name="big", namespace="models").values()
    )
    found = [each for text in texts for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


@pytest.mark.parametrize("most", [1, 8, 40])
def test_haproxy_has_a_slot_for_each_server_that_there_may_be(most: int):
    objects = rendered(servers={"max": most})
    file = objects["ConfigMap", "big-haproxy"]["data"]["haproxy.cfg"]
    blocks = [match.group().splitlines() for match in SERVERS.finditer(file)]
    assert [len(block) for block in blocks] == [most, most]
    stateful = objects["StatefulSet", "big-server"]["spec"]
    for block in blocks:
        for number, line in enumerate(block):
            pod = f"big-server-{number}.{stateful['serviceName']}.models.svc.cluster.local:8000"
            assert line.split()[:5] == ["server", f"s{number + 1}", pod, "id", str(number + 1)]
    assert objects["HorizontalPodAutoscaler", "big-server"]["spec"]["maxReplicas"] == most


def test_selectors_find_what_the_chart_makes():
    objects = rendered()
    pods = {
        name: objects[kind, name]["spec"]["template"]["metadata"]["labels"]
        for kind, name in objects
        if kind in ("StatefulSet", "Deployment")
    }
    for (kind, name), each in objects.items():
        if kind in ("Service", "PodDisruptionBudget"):
            wanted = each["spec"]["selector"]
            wanted = wanted.get("matchLabels", wanted)
            chosen = [pod for pod, labels in pods.items() if wanted.items() <= labels.items()]
            assert len(chosen) == 1, name
    monitored = objects["ServiceMonitor", "big-server"]["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= objects["Service", "big-server"]["metadata"]["labels"].items()


def test_no_password_is_in_an_object():
    objects = rendered(passwords={"secret": "big-passwords"}, database={"secret": "big-database"})
    pod = objects["StatefulSet", "big-server"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    secrets = {each["name"]: each["valueFrom"]["secretKeyRef"]["name"] for each in server["env"]}
    assert secrets == {"PGPASSWORD": "big-database"}
    mounts = {each["name"]: each["mountPath"] for each in server["volumeMounts"]}
    (volume,) = (each for each in pod["volumes"] if "secret" in each)
    assert volume["secret"]["secretName"] == "big-passwords"
    files = [word.partition("=")[2] for word in server["args"] if "password" in word]
    assert files == [f"{mounts[volume['name']]}/{name}" for name in ("password", "metrics-password")]
    plain = rendered()["StatefulSet", "big-server"]["spec"]["template"]["spec"]["containers"][0]
    assert not any("password" in word for word in plain["args"])


def test_flags_are_words_that_a_server_takes():
    flags = {"--replay-tokens": 12_000_000, "--batch-invariant": True, "--l3-gb": 0.5, "--wkv": "fp16"}
    pod = rendered(servers={"flags": flags})["StatefulSet", "big-server"]["spec"]["template"]["spec"]
    words = set(pod["containers"][0]["args"])
    assert {"--replay-tokens=12000000", "--batch-invariant", "--l3-gb=0.5", "--wkv=fp16"} <= words
    with pytest.raises(Exception, match="--batch-invariant is false"):
        rendered(servers={"flags": {"--batch-invariant": False}})


def test_haproxy_ends_after_it_is_asked_no_more_and_its_streams_have():
    objects = rendered()
    pod = objects["Deployment", "big-haproxy"]["spec"]["template"]["spec"]
    _, seconds = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    file = objects["ConfigMap", "big-haproxy"]["data"]["haproxy.cfg"]
    (streams,) = re.findall(r"^    hard-stop-after (\d+)s$", file, re.MULTILINE)
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + int(streams)


def test_a_gpu_is_asked_for_only_where_there_is_one():
    for gpus in (0, 2):
        (server,) = rendered(servers={"gpus": gpus})["StatefulSet", "big-server"]["spec"]["template"]["spec"][
            "containers"
        ]
        assert server["resources"]["limits"].get("nvidia.com/gpu") == (str(gpus) if gpus else None)


def test_servers_give_states_to_each_other_if_there_is_a_secret_for_that():
    def flags(**more: object) -> list[str]:
        server = rendered(passwords={"secret": "W"} | more)["StatefulSet", "big-server"]
        words: list[str] = server["spec"]["template"]["spec"]["containers"][0]["args"]
        return [word for word in words if word.startswith("--cluster")]

    assert flags() == []
    secret, address = flags(clusterSecret=True)
    assert secret == "--cluster-secret-file=/run/secrets/rwkv/cluster-secret"
    assert address.startswith("--cluster-address=$(POD_NAME).") and address.endswith(
        ".svc.cluster.local:8000"
    )
