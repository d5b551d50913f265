"""What stands in configs/deploy: a configuration Ray Serve takes, and a manifest Kubernetes takes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_eagle.deploy.application import flags


def manifests(repository: Path) -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((repository / "configs" / "deploy" / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def ray_config(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((repository / "configs" / "deploy" / "ray.yaml").read_text())
    return found


def parsed(words: list[str], model: str) -> Any:
    from vllm_eagle.integration.serving import _parse

    return _parse([model if word.startswith("/models") else word.replace("/models/head", model) for word in words])


def test_ray_serve_takes_its_configuration(repository: Path, target: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an option Ray Serve does not know, a deployment that does not exist, and a builder it does not call."""
    from ray._common.utils import import_attr
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as built
    from ray.serve.schema import ServeDeploySchema

    monkeypatch.setenv("MODEL", target)
    monkeypatch.setenv("HEAD", head)

    config = ServeDeploySchema.model_validate(ray_config(repository))
    (application,) = config.applications
    (deployment,) = application.deployments
    assert deployment.name == built(import_attr(application.import_path), application.args)._bound_deployment.name
    assert deployment.autoscaling_config["target_ongoing_requests"] < deployment.max_ongoing_requests


def test_its_arguments_are_flags(repository: Path, target: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a flag vLLM does not have, and folders that are not filled in."""
    monkeypatch.setenv("MODEL", target)
    monkeypatch.setenv("HEAD", head)
    args = parsed(flags(ray_config(repository)["applications"][0]["args"]), target)
    assert (args.model, args.speculative_model, args.max_num_seqs) == (target, head, 16)


def test_the_manifest_fits_kubernetes(repository: Path) -> None:
    """Catches a field Kubernetes does not know; without `kubernetes-validate` (it is in `dev`) kinds and names are all."""
    documents = manifests(repository)
    assert documents.keys() == {"Service", "Deployment", "PodDisruptionBudget"}
    if importlib.util.find_spec("kubernetes_validate"):
        import kubernetes_validate

        for document in documents.values():
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    for document in documents.values():
        assert document["apiVersion"] in ("v1", "apps/v1", "policy/v1")
        assert document["metadata"]["name"] == "vllm-eagle"


def test_the_manifest_fits_together(repository: Path) -> None:
    """Catches what a schema cannot see: a selector that finds no pod, a probe of no port, a mount of no volume."""
    documents = manifests(repository)
    service, deployment, budget = (
        documents["Service"]["spec"],
        documents["Deployment"]["spec"],
        documents["PodDisruptionBudget"]["spec"],
    )
    pod = deployment["template"]["spec"]
    labels = deployment["template"]["metadata"]["labels"].items()
    for selector in (service["selector"], deployment["selector"]["matchLabels"], budget["selector"]["matchLabels"]):
        assert selector.items() <= labels
    assert budget["minAvailable"] < deployment["replicas"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    targets = [port["targetPort"] for port in service["ports"]]
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {*targets, *(probe["port"] for probe in probes)} == ports.keys()
    assert {probe["path"] for probe in probes} == {"/health"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment["OMP_NUM_THREADS"] == container["resources"]["limits"]["cpu"]


def test_the_manifest_starts_a_server(repository: Path, target: str) -> None:
    """Catches a flag vLLM does not have, a port nobody listens on, and a pod that is killed while it drains."""
    pod = manifests(repository)["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:2] == ["vllm", "serve"]
    args = parsed(["--model", *container["command"][2:], *container["args"]], target)
    assert args.speculative_model == target
    assert args.port == container["ports"][0]["containerPort"]
    assert args.shutdown_timeout < pod["terminationGracePeriodSeconds"]
