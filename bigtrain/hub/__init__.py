"""Load and export models of the Hugging Face Hub: configuration, weights and tokenizer.

Decides: how a folder or an id is found; which class of transformers (or timm) its configuration
means; which tensors of the files make each tensor of the model, and the reverse for an export;
which of the folder's files a checkpoint keeps. Only this package imports timm and huggingface_hub,
and only for such a model. Besides this package, only `data` imports transformers, for tokenizers.
"""
