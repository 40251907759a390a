# SPDX-License-Identifier: Apache-2.0
"""One line in programs of frameworks that wrap the model themselves.

- `huggingface`: `trainer.add_callback(OktopkCallback(trainer))`, for the Trainer of Hugging Face
- `accelerate`: `handle = attach(accelerator, model, optimizer)` after `accelerator.prepare`
- `lightning`: `Trainer(callbacks=[OktopkCallback()])`, and for Fabric
  `handle = attach_fabric(fabric, model, optimizer)` after `fabric.setup`
- `ray`: `handle = attach(model, optimizer)` after `prepare_model` of Ray Train
- `ignite`: `handle = attach(model, optimizer)` after `auto_model` and `auto_optim`

Each module imports its framework, so import the one you need. All take the options of
`oktopk.attach`. Where one process trains alone there is nothing to exchange: the line stays as it
is, and does nothing.
"""
