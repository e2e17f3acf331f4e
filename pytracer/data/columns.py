"""The columns of every table that a view returns: dtype, unit and meaning.

docs/api.md and `.pytracer.human()` are made from it, and a test compares each table with it.
"""

from typing import NamedTuple

from pytracer.data.schema import CATEGORY_ORDER


class Column(NamedTuple):
    """A column; the index comes first."""

    name: str
    dtype: str  # of pandas; "text" stands for its kinds of texts
    unit: str  # "" for none
    meaning: str
    is_index: bool = False


# A line per column: name (with * if it is the index), dtype, unit (or -), meaning. CATEGORIES
# stands for one column per category. A table without rows has the same columns.
_TEXT = """
t.summary()
category*          text    -       a word of docs/categories.md
at_peak            int64   bytes   at the trace's peak
own_peak           int64   bytes   most at any time
at_end             int64   bytes   when the trace ended
allocations        int64   -       number of blocks

t.by("module")
module*            text    -       the keys that were asked for: here one, else one level each
bytes              int64   bytes   alive at the moment that was asked for
allocations        int64   -       number of blocks

t.allocations()
id                 int64   -       number of the row
device             text    -       cpu, cuda:0, ...
address            uint64  -       where the block lay
requested_bytes    int64   bytes   what the program asked for
allocated_bytes    Int64   bytes   what CUDA's allocator gave; NA on the CPU
start_ns           Int64   ns      since the trace began; NA if older
end_ns             Int64   ns      given back; NA if still alive
step               Int64   -       from 0; NA if older than the trace
phase              text    -       forward, backward, ...
category           text    -       a word of docs/categories.md
role               text    -       the kind within the category
name               text    -       of the parameter, buffer or state
module             text    -       path of the module that made it
op                 text    -       operator that made it
line               text    -       the program's line; with stacks=True
forward_module     text    -       for blocks of a backward: module of the forward
forward_op         text    -       and its operator
forward_line       text    -       and its line
free_phase         text    -       phase in which it was given back
stream             uint64  -       CUDA's number of the stream
pool               text    -       small, large, or a private pool
thread             uint16  -       number of the thread
shape              text    -       where a tensor is known
dtype              text    -       where a tensor is known
values             text    -       what compiled code holds in it, one after the other

t.timeline()
time_ns*           int64   ns      since the trace began
CATEGORIES         int64   bytes   in use after the event; or one column per phase or device

t.steps()
step*              int64   -       from 0
peak_bytes         int64   bytes   most during the step
growth_bytes       int64   bytes   end, less the previous step's end
start_bytes        int64   bytes   as the step began
end_bytes          int64   bytes   as it ended
allocations        int64   -       number of blocks made
micro_steps        int64   -       backward passes that a forward preceded
start_ns           int64   ns      since the trace began
end_ns             int64   ns      since the trace began
device_forward_ns  Int64   ns      by the device's clock; NA without one
device_backward_ns Int64   ns      by the device's clock
device_optimizer_ns Int64  ns      by the device's clock
forward_ns         int64   ns      by the host's clock
backward_ns        int64   ns      by the host's clock
optimizer_ns       int64   ns      by the host's clock

t.peaks()
kind*              text    -       training, evaluation, generation
peak_bytes         int64   bytes   most at once
step               int64   -       from 0
phase              text    -       at that moment
time_ns            int64   ns      since the trace began
CATEGORIES         int64   bytes   at that moment

t.parameters()
name*              text    -       of the parameter
placement          text    -       how it is cut over the mesh, or whole
mesh_dim           text    -       the dimension that cuts it
local_bytes        int64   bytes   this rank's part
global_bytes       int64   bytes   all of it

t.bytes_per_parameter()
category*          text    -       weights, gradients, optimizer_state
bytes              int64   bytes   most at any time
per_parameter      float64 bytes   the same, per parameter
textbook           text    -       the usual rule
at_peak            float64 bytes   per parameter, at the trace's peak
at_rest            float64 bytes   per parameter, as the trace ended

t.ledger()
name               text    -       the row
bytes              Int64   bytes   NA if not known
level              int64   -       rows of level 1 are parts of the row of level 0 above
known_by           text    -       events, nvml, difference, ...
moment             text    -       when it was read

t.fragmentation()
address            int64   -       where the segment lies
pool               text    -       small or large
private_pool       text    -       of CUDA graphs
stream             int64   -       CUDA's number of the stream
bytes              int64   bytes   of the segment
used               int64   bytes   in blocks
free               int64   bytes   in gaps
gaps               int64   -       number of them
largest_gap        int64   bytes   the largest
unusable           Int64   bytes   in gaps too small for the request; NA without one
free_pages         int64   bytes   whole pages in gaps

t.replay().timeline()
time_ns*           int64   ns      since the trace began
reserved           int64   bytes   from the driver
active             int64   bytes   in blocks
largest_free       int64   bytes   the largest free block
unused             int64   bytes   reserved, less active

t.fits("24GiB").settings()
settings           text    -       of PYTORCH_ALLOC_CONF
as_recorded        bool    -       those of the trace
peak_reserved      int64   bytes   most reserved from the driver
smallest_room      int64   bytes   least for the allocator with which it runs
retries            int64   -       times that the allocator emptied its cache
runs               bool    -       on the card that was asked for
smallest_card      int64   bytes   smallest_room and what lies beside the allocator

t.checkpoint_plan("1GiB").table()
modules            object  -       tuple of paths to checkpoint
peak               int64   bytes   predicted, requested bytes
peak_reserved      int64   bytes   predicted, by CUDA's allocator; none on the CPU
time_ratio         float64 -       a step's time over that without the plan
fits               bool    -       in the budget
offloaded          object  -       tuple of paths to offload
pinned             int64   bytes   of the host, for those
count              int64   -       number of modules

t.findings()
kind               text    -       a rule of docs/findings.md
bytes              int64   bytes   kept in vain; for growth per step
at_peak            int64   bytes   how much lower the peak would be
evidence           text    -       why it is known
change             text    -       what ends it
line               text    -       that made most of it; with stacks=True
module             text    -       that made most of it

t.advice()
kind               text    -       mistake, free, trade or noticed
change             text    -       what to do
saves              Int64   bytes   of the peak; NA where no replay shows it
peak_after         Int64   bytes   with this change alone
price              text    -       what it costs
numbers            text    -       whether results stay bit-equal
code               text    -       to paste
enough             boolean -       for the request that failed; NA where none did

t.cost()
module*            text    -       or op, or class, as asked for
class              text    -       of most of its forward time
calls              int64   -       number of them
forward_ns         int64   ns      time in forward
backward_ns        int64   ns      time in backward
recompute_ns       int64   ns      time in forwards that run again
optimizer_ns       int64   ns      time in the optimizer
other_ns           int64   ns      time elsewhere
time_ns            int64   ns      all of it
time_share         float64 share   of all measured time
forward_flops      int64   FLOP    by formula
backward_flops     int64   FLOP    by formula
recompute_flops    int64   FLOP    by formula
forward_bytes      int64   bytes   moved, by model
backward_bytes     int64   bytes   moved, by model
recompute_bytes    int64   bytes   moved, by model
flop_ratio         Float64 -       backward over forward
byte_ratio         Float64 -       backward over forward
time_ratio         Float64 -       backward over forward
expected_ratio     Float64 -       of the times
expected_because   text    -       why
flops_per_s        Float64 FLOP/s  reached
of_peak_flops      Float64 share   of the device's highest rate
bytes_per_s        Float64 bytes/s reached
of_peak_bandwidth  Float64 share   of the device's highest rate
verdict            text    -       what limits it
cause              text    -       why the ratio differs
uncounted_calls    int64   -       without a formula
without_bytes_ns   int64   ns      time without a model of bytes

t.diff(other)
category           text    -       of these five, the keys that both traces have
module             text    -       path of the module
op                 text    -       operator
line               text    -       the program's line
phase              text    -       forward, backward, ...
before             int64   bytes   at the first peak
after              int64   bytes   at the second peak
change             int64   bytes   after, less before
blocks_before      int64   -       number of blocks
blocks_after       int64   -       number of blocks
kind               text    -       new, gone, grown, ...

t.health()
name*              text    -       of what was lost or not seen
severity           text    -       how much it matters
meaning            text    -       in words
advice             text    -       what to do
count              int64   -       how often

job.ranks()
rank*              int64   -       number of the rank
status             text    -       whole, truncated, damaged, ...
host               text    -       its machine
device             text    -       cpu, cuda:0, ...
peak               int64   bytes   most at once
CATEGORIES         int64   bytes   at the peak
reserved           int64   bytes   from the driver; none on the CPU
growth_per_step    int64   bytes   after the first step
steps              int64   -       number of steps
step_ns            int64   ns      median step; 0 if it is not known, as of an imagined run
forward_ns         int64   ns      median forward
part               text    -       of a pipeline
file               text    -       its trace

job.findings()
rank               int64   -       number of the rank
kind               text    -       a rule of docs/findings.md
bytes              int64   bytes   kept in vain
module             text    -       that made most of it
line               text    -       that made most of it
evidence           text    -       why it is known
change             text    -       what ends it

history.steps()
step*              uint64  -       number of the first of its steps
device             text    -       cpu, cuda:0, ...
steps              uint32  -       1; more in old rows, which stand for several
peak               int64   bytes   requested, most at once; of several steps the middle one
least_peak         int64   bytes   the least of the steps' peaks
highest_peak       int64   bytes   the highest of them
now                int64   bytes   alive as the last of them ended
reserved_peak      int64   bytes   most that was reserved from the driver
largest            uint64  bytes   the largest request
requests           uint64  -       number of requests; of several steps the middle one
failed             uint32  -       requests that failed, in all of them
duration_ns        uint64  ns      by the host's clock; of several steps the middle one
unix_ns            int64   ns      when the last of them ended, since 1970
looked_at          uint32  -       how many of them have a look
"""


def _parsed() -> dict[str, tuple[Column, ...]]:
    tables: dict[str, tuple[Column, ...]] = {}
    for part in _TEXT.strip().split("\n\n"):
        title, *lines = part.splitlines()
        columns = []
        for line in lines:
            name, dtype, unit, meaning = line.split(maxsplit=3)
            rest = (dtype, unit.replace("-", ""), meaning, name.endswith("*"))
            names = CATEGORY_ORDER if name == "CATEGORIES" else (name.removesuffix("*"),)
            columns += [Column(each, *rest) for each in names]
        tables[title] = tuple(columns)
    return tables


TABLES = _parsed()
UNITS = {one.name: one.unit for columns in TABLES.values() for one in columns if one.unit}
