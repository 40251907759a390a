# SPDX-License-Identifier: Apache-2.0
"""What `oktopk train` trains: a task has the data, the model, the loss and the metrics.

base       `Task`, which every task implements, and `Metric`
checks     what a task must return
registry   the tasks by name, and tasks in files of users
speech     lstman4 on AN4 or on a synthesized corpus
text       a GPT that predicts the next character of a text
images     ResNet-20 or VGG-16 on folders of images
"""

from oktopk.lab.tasks.base import Metric, Task, TaskOptions, fingerprint, option

__all__ = ["Metric", "Task", "TaskOptions", "fingerprint", "option"]
