# SPDX-License-Identifier: Apache-2.0
"""Image classification: ResNet-20 or VGG-16 on folders of images.

options   the settings of the task
folders   which images a folder or a zip archive has, and of which classes
decode    images of files, decoded once into a file that all ranks map
dataset   images and labels, of files or of scikit-learn's digits
augment   random shifts and flips
resnet    ResNet-20
vgg       VGG-16
task      `Images`: accuracy and cross entropy
"""
