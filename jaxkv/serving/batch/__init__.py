"""The batch job: a JSONL file of requests in, a JSONL file of answers out, each exactly once whatever happens in between.

lines.py        a line of the input becomes a Task or a BadLine
source.py       the input file: where its lines are, which ids come twice, what a shard has
output_file.py  the output file: appended, fsynced, recovered after a kill, sorted
names.py        of the job's own files
job_file.py     which job an output belongs to
records.py      the records of the output
job.py          the loop that keeps an engine fed
"""

from jaxkv.serving.batch.job import Job, Tally, what_is_left
from jaxkv.serving.batch.job_file import claim
from jaxkv.serving.batch.lines import BadLine, Defaults, LineReader, Task
from jaxkv.serving.batch.names import beside
from jaxkv.serving.batch.output_file import OutputFile
from jaxkv.serving.batch.records import Records
from jaxkv.serving.batch.source import Source

__all__ = [
    "BadLine",
    "Defaults",
    "Job",
    "LineReader",
    "OutputFile",
    "Records",
    "Source",
    "Tally",
    "Task",
    "beside",
    "claim",
    "what_is_left",
]
