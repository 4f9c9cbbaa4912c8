"""Images in memory: scaled, cropped, mirrored."""

import torch
import torch.nn.functional as F

from crossbn.lab.data.drawing import choose
from crossbn.lab.data.memory import MemoryImages, Scaling, resize
from tests.lab.data.tiny import draw


def pictures(count: int = 6, channels: int = 3, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, channels, size, size), generator=generator, dtype=torch.uint8), torch.arange(
        count
    )


def test_what_is_skipped_is_what_would_be_chosen() -> None:
    first, rest, some = choose(20, 8), choose(20, None, skip=8), choose(20, 5, 8)
    assert sorted(torch.cat([first, rest]).tolist()) == list(range(20))
    assert torch.equal(some, rest[:5])


def test_scaling_is_of_each_channel() -> None:
    images, _ = pictures(2000, 2, 3)
    scaling = Scaling.of(images)
    values = images.double()
    torch.testing.assert_close(scaling.mean.flatten(), values.mean((0, 2, 3)).float())
    torch.testing.assert_close(scaling.std.flatten(), values.std((0, 2, 3), correction=0).float())


def test_a_constant_channel_is_no_nan() -> None:
    images = torch.zeros(4, 1, 3, 3, dtype=torch.uint8)
    batch, _ = MemoryImages(images, torch.zeros(4).long(), Scaling.of(images), 1)[draw(0, 1)]
    assert torch.equal(batch, torch.zeros(2, 1, 3, 3))


def test_without_augmentation_a_batch_is_the_images() -> None:
    images, classes = pictures()
    scaling = Scaling.of(images)
    batch, found = MemoryImages(images, classes, scaling, 3)[draw(4, 1)]
    assert found.tolist() == [4, 1]
    torch.testing.assert_close(batch * scaling.std + scaling.mean, images[[4, 1]].float(), rtol=0, atol=1e-4)


def test_grey_images_are_repeated() -> None:
    images, classes = pictures(channels=1)
    batch, _ = MemoryImages(images, classes, Scaling.of(images), 3)[draw(0)]
    assert batch.shape == (1, 3, 8, 8)
    assert torch.equal(batch[:, 0], batch[:, 2])


def test_every_augmented_image_is_a_crop_or_its_mirror() -> None:
    images, classes = pictures()
    scaling = Scaling.of(images)
    data = MemoryImages(images, classes, scaling, 3, crop=True, mirror=True)
    padded = F.pad((images.float() - scaling.mean) / scaling.std, (1, 1, 1, 1))
    found: list[tuple[int, int, bool]] = []
    for seed in range(20):
        batch, _ = data[draw(2, 5, seed=seed)]
        for image, original in zip(batch, padded[[2, 5]], strict=True):
            crops = {(y, x): original[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)}
            places = {(y, x, False) for (y, x), crop in crops.items() if torch.equal(crop, image)}
            places |= {(y, x, True) for (y, x), crop in crops.items() if torch.equal(crop.flip(2), image)}
            assert len(places) == 1
            found += places
    assert {place[0] for place in found} == {place[1] for place in found} == {0, 1, 2}
    assert {place[2] for place in found} == {False, True}


def test_augmentation_is_of_the_draw_alone() -> None:
    images, classes = pictures()
    data = MemoryImages(images, classes, Scaling.of(images), 3, crop=True, mirror=True)
    first = data[draw(0, 1, 2, seed=7)][0]
    torch.manual_seed(5)
    assert torch.equal(data[draw(0, 1, 2, seed=7)][0], first)
    assert not torch.equal(data[draw(0, 1, 2, seed=8)][0], first)


def test_choice_is_always_the_same_and_grows() -> None:
    few, more = choose(50, 5), choose(50, 9)
    assert torch.equal(few, more[:5])
    assert few.tolist() != [0, 1, 2, 3, 4]
    assert choose(50, None).tolist() == choose(50, 60).tolist() == list(range(50))


def test_resizing_keeps_what_has_the_size() -> None:
    images, _ = pictures()
    assert resize(images, 8) is images
    assert resize(images, None) is images
    flat = torch.full((3, 1, 4, 4), 77, dtype=torch.uint8)
    assert torch.equal(resize(flat, 9), torch.full((3, 1, 9, 9), 77, dtype=torch.uint8))
