"""Look a machine, an installation, a target and a head over before anything is served."""

from vllm_eagle.doctor.finding import Finding, Level

__all__ = ["Finding", "Level"]
