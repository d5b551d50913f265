"""How many nodes pay: measured costs, calibrated acceptance, and the choice between them in every step."""

from vllm_eagle.control.calibration import Calibration
from vllm_eagle.control.controller import Controller
from vllm_eagle.control.costs import Costs, Curve

__all__ = ["Calibration", "Controller", "Costs", "Curve"]
