"""Add mechanisms to a pretrained model: choose the mechanisms and their layers, and write the recipe that trains the
model further.

    request.py, write.py        `--with`: which mechanisms, switched off at first; the checkpoint
    heal.py                     the recipe that trains it: `blend_steps`, the gates' learning rate, the teacher
    spans.py, search_page.py    `--search`: layers to loop
    screen.py, screen_page.py   `--screen`: scores of closed gates
    exits.py                    `--exit`: the confidence at which tokens leave a loop
    trial.py, trial_page.py     `fathom try`

`write.py` also reads the model back, compares its logits, and keeps an edited `heal.yaml` as `heal.yaml.old`.
`evaluation/deepened.py` compares base, deepened model and control, and decides which differences count.
"""
