"""TVM as a backend: graphs lowered through Relax, kernels scheduled by MetaSchedule.

Importing this does not import TVM.
"""
