import pytest

from crossbn.lab.experiments.estimates import in_words, training_seconds


def test_a_training_takes_what_its_layers_and_its_images_take() -> None:
    without_images = training_seconds("resnet50", 224, 100, 0)
    assert without_images == pytest.approx(100 * 50 * 6e-4)
    an_image = 50 * 2 * 9 * 64**2 * 8**2 / 3e10
    assert training_seconds("resnet50", 8, 100, 2, width=64) == pytest.approx(without_images + 2 * an_image)
    assert training_seconds("mobilenet_v2", 8, 100, 0) == pytest.approx(100 * 20 * 6e-4)  # a version, no layers


def test_times_as_people_say_them() -> None:
    assert [in_words(each) for each in (0.2, 80, 5400, 20000, 1e6, 1e8)] == [
        *("1 s", "80 s", "90 min", "6 h", "12 days", "3.2 years")
    ]
