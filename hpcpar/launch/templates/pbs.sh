#!/usr/bin/env bash
# @job@ on @nodes@ node(s) with @ranks_per_node@ rank(s) each, by hpcpar submit.
# Template: @template@
#
# Before its time limit the job saves a checkpoint and submits this script again; the next job goes on from there.
#PBS -N @name@
#PBS -l select=@select@
#PBS -l walltime=@time@
#PBS -q @partition@
#PBS -A @account@
#PBS -j oe
#PBS -o @log@.pbs.log
#PBS -r y
#PBS @option@

cd @directory@ || exit
exec >>@log@."${PBS_JOBID%%.*}".log 2>&1
@setup@

told='' ended=''
trap 'told=1; kill -USR1 "$launcher"' USR1
# Who deletes a job does not want it back: its ranks save, and that is all.
trap 'told=1 ended=1; kill -USR1 "$launcher"' TERM

# PBS sends no signal some minutes before the limit; timeout does, and passes on those it gets
timeout --foreground --preserve-status --signal=USR1 @seconds_to_margin@ @launcher@ @command@ &
launcher=$!
wait "$launcher"
status=$?
# a trap ends wait, not the launcher
while [[ $told ]]; do
    told=''
    wait "$launcher"
    status=$?
done

starts=${HPCPAR_STARTS:-1}
if ((status == @requeue_status@)) && [[ -z $ended ]] && ((starts <= @restarts@)); then
    echo "saved; back into the queue after start $starts"
    qsub -v HPCPAR_STARTS=$((starts + 1)) @script@ || echo "nodes may not submit here; go on with: qsub" @script@
fi
exit "$status"
