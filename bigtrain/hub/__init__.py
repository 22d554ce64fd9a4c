"""Models of the Hugging Face Hub: their configuration, weights and tokenizer, in and out.

Decides: how a folder or an id is found; which class of transformers (or timm) its configuration
means; which tensors of the files make each tensor of the model, and the reverse for an export;
which of the folder's files a checkpoint keeps. Only this package imports transformers, timm and
huggingface_hub, and only when such a model is named.
"""
