"""Operations on tensors that do not depend on what the tensors are for.

Decides: local parts of sharded tensors; fake and meta copies; FLOPs and bytes of an operation;
copies to the host and to disk; tensors inside nested structures.
"""
