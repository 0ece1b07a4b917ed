"""Tapes of real PyTorch code, recorded on fake tensors: no GPU, no memory, real autograd.

``job`` says what is traced, ``worker`` traces it in a process of its own, ``run`` starts that process and
``compare`` puts the result beside the estimate. Only ``worker`` and what it imports need torch.
"""
