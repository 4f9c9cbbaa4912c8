from crossbn.lab.experiments.cells import BURN_IN, cbn, exact, plain, varied


def test_equal_trainings_are_equal_cells() -> None:
    assert cbn(2) == cbn(2, 8) == cbn(2, order=1, backward="through", burn_in=BURN_IN)
    assert cbn(2, order=0) == cbn(2, order=0, backward="detached", positions=16)  # nothing to follow, nothing to sample
    assert cbn(16) == plain("bn", 16)
    assert cbn(4, 1, order=2) == plain("bn", 4)


def test_different_trainings_have_different_names() -> None:
    cells = [
        *(plain("bn", 2), plain("gn", 2), plain("bn", 4), cbn(2), cbn(2, 4), cbn(2, order=0), cbn(2, order=2)),
        *(cbn(2, backward="detached"), cbn(2, positions=16), cbn(2, positions=None), cbn(2, burn_in=0.5)),
        *(cbn(2, order=0, burn_in=0.0), exact(2, "own"), exact(2, "full"), exact(2, "full", 4)),
        *(cbn(2, decay=0.9), cbn(2, decay=0.7), varied(cbn(2), "extrapolated"), varied(cbn(2, 16), "extrapolated")),
    ]
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(cells)
    assert names[9] == "CBN, batch 2, window 8, positions all"
    assert names[10] == "CBN, batch 2, window 8, burn-in 50%"


def test_exact_statistics_are_those_of_batch_norm_over_the_window() -> None:
    cell = exact(4, "none")
    assert (cell.norm, cell.batch_size, cell.window, cell.burn_in, cell.gradient) == ("bn", 4, 4, BURN_IN, "none")


def test_a_variant_is_the_same_training_otherwise() -> None:
    cell = varied(cbn(2, 16), "growing from 2")
    assert cell.name == "CBN, batch 2, window 16, growing from 2"
    assert (cell.norm, cell.window, cell.options, cell.burn_in) == ("cbn", 16, {}, BURN_IN)
