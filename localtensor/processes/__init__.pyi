from localtensor.processes.pool import Pool as Pool
from localtensor.processes.worker_group import deaf as deaf
