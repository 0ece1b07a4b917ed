sbatch --nodes=2 job.sbatch
