from localtensor.processes.idleness import Idleness as Idleness
from localtensor.processes.idleness import is_late as is_late
from localtensor.processes.idleness import processor_time as processor_time
from localtensor.processes.idleness import signal_name as signal_name
from localtensor.processes.pool import Pool as Pool
from localtensor.processes.worker import end_with_parent as end_with_parent
from localtensor.processes.worker_group import prepare as prepare
from localtensor.processes.worker_group import sigint_blocked as sigint_blocked
