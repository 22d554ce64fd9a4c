"""What is done with a tensor whatever it is for.

Local and full values of sharded tensors; fake and meta copies; FLOPs and bytes of an operation;
copies to the host and to disk; tensors inside nested structures.
"""
