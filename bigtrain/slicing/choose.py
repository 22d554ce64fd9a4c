"""temporary"""
from types import SimpleNamespace
from bigtrain.slicing.slices import Section, Slices
def plan_slices(workload, ranks, prices=None, limit=None):
    S={}
    for n,p in workload.model.named_parameters(remove_duplicate=False):
        if n.endswith("attention.qkv.weight") or n.endswith("attention.qkv.bias"):
            w=p.shape[0]//3; h=workload.model.get_submodule(n.rsplit(".",2)[0]).num_heads
            S[n]=Slices(0,(Section(w,w//h),)*3)
        elif n.endswith("attention.output.weight"):
            h=workload.model.get_submodule(n.rsplit(".",2)[0]).num_heads
            S[n]=Slices.even(1,p.shape[1],p.shape[1]//h)
        elif ".mlp.expand" in n: S[n]=Slices.even(0,p.shape[0])
        elif n.endswith("mlp.output.weight"): S[n]=Slices.even(1,p.shape[1])
        elif n in("embedding.token.weight","head.weight"): S[n]=Slices.even(0,p.shape[0])
    return SimpleNamespace(slices=S, kept={})
