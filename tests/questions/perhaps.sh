if [ "$KIND" = long ]; then
  bash job.sbatch
fi
