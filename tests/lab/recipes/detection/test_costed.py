"""The detector whose cost is measured."""

import torch
from torch import nn

from crossbn.lab.cost.suites import make_suite
from crossbn.lab.models import find_model
from crossbn.lab.recipes.detection.costed import CostedDetector


def test_the_suites_detector_is_found_and_has_losses_and_objects() -> None:
    (goal,) = make_suite("detection")
    model = find_model(goal.case.model)()
    assert isinstance(model, CostedDetector)
    assert sum(isinstance(each, nn.BatchNorm2d) for each in model.modules()) == 32
    images = torch.rand(1, 3, 64, 64)
    losses = model(images)
    assert set(losses) == {"loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg"}
    assert all(bool(torch.isfinite(each)) for each in losses.values())
    (found,) = model.eval()(images)
    assert set(found) == {"boxes", "labels", "scores"}
