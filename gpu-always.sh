python setup.py build_ext --inplace > /tmp/build.log 2>&1 || { tail -20 /tmp/build.log; exit 1; }
timeout 200 python -m pytest tests/test_always.py -q -n 0 2>&1 | tail -15
cat > /tmp/price.py <<'PY'
import contextlib, shutil, time, sys, json
import torch, pytracer
from transformers import GPT2Config, GPT2LMHeadModel
def make(batch, layers):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers)).cuda(); opt = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randint(0, 50257, (batch, 64), device="cuda")
    def step():
        model(input_ids=x, labels=x).loss.backward(); opt.step(); opt.zero_grad(set_to_none=True)
    return step
step = make(1, 12)
for _ in range(30): step()
rows = []
for rep in range(3):
    for on in (False, True):
        shutil.rmtree("/tmp/p.always", ignore_errors=True)
        recorder = pytracer.always("/tmp/p.always") if on else contextlib.nullcontext()
        with recorder:
            torch.cuda.synchronize(); t, w = time.thread_time(), time.perf_counter()
            for _ in range(1000): step()
            torch.cuda.synchronize(); d = time.thread_time() - t; wd = time.perf_counter() - w
        rows.append((on, d, wd)); print(on, round(d*1e3,1), round(wd*1e3,1), flush=True)
h = pytracer.load("/tmp/p.always"); print(h)
import glob, os
print({p: os.path.getsize(p) for p in glob.glob("/tmp/p.always/*")})
PY
python /tmp/price.py 2>&1 | tail -60
