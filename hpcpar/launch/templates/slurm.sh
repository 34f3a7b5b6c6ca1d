#!/usr/bin/env bash
# @job@ on @nodes@ node(s) with @ranks_per_node@ rank(s) each, by hpcpar submit.
# Template: @template@
#
# Before its time limit, and when it is preempted, the job saves a checkpoint and puts itself back into the queue; the
# next start goes on from there. So do the elements of an array (--array=1-8%1), one after the other.
#SBATCH --job-name=@name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=@ranks_per_node@
#SBATCH --cpus-per-task=@cores_per_rank@
#SBATCH --gpus-per-node=@gpus_per_node@
#SBATCH --time=@time@
#SBATCH --array=1-@chain@%1
#SBATCH --partition=@partition@
#SBATCH --account=@account@
#SBATCH --output=@log@.%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# B: the signal is for this script, which tells the launcher: srun and mpirun pass it on to all ranks alike.
#SBATCH --signal=B:USR1@@margin@
#SBATCH @option@

cd @directory@ || exit
@setup@
# srun does not take this from sbatch by itself
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

told='' ended=''
trap 'told=1; kill -USR1 "$launcher"' USR1
# Who cancels a job does not want it back: its ranks save, and that is all.
trap 'told=1 ended=1; kill -USR1 "$launcher"' TERM

@launcher@ @command@ &
launcher=$!
wait "$launcher"
status=$?
# a trap ends wait, not the launcher
while [[ $told ]]; do
    told=''
    wait "$launcher"
    status=$?
done

if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then
    case $status in
        0) scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" ;; # done: nothing is left for the other elements
        @requeue_status@) ((SLURM_ARRAY_TASK_ID == SLURM_ARRAY_TASK_MAX)) || status=0 ;;
    esac
elif ((status == @requeue_status@)) && [[ -z $ended ]] && ((${SLURM_RESTART_COUNT:-0} < @restarts@)); then
    echo "saved; back into the queue after start $((${SLURM_RESTART_COUNT:-0} + 1))"
    scontrol requeue "$SLURM_JOB_ID" || echo "no requeue here; go on with: sbatch, and the same script"
fi
exit "$status"
