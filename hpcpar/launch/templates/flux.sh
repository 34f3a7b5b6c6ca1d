#!/usr/bin/env bash
# @job@ on @nodes@ node(s) with @ranks_per_node@ rank(s) each, by hpcpar submit.
# Template: @template@
#
# Before its time limit the job saves a checkpoint and submits this script again; the next job goes on from there.
#flux: --job-name=@name@
#flux: --nodes=@nodes@
#flux: --exclusive
#flux: --time-limit=@minutes@m
#flux: --queue=@partition@
#flux: --bank=@account@
#flux: --output=@log@.{{id}}.log
#flux: @option@

cd @directory@ || exit
@setup@

options=(
    --nodes=@nodes@
    --tasks-per-node=@ranks_per_node@
    --gpus-per-node=@gpus_per_node@
)
told='' ended=''
trap 'told=1; flux job kill --signal=SIGUSR1 "$job"' USR1
# Who cancels a job does not want it back: its ranks save, and that is all.
trap 'told=1 ended=1; flux job kill --signal=SIGUSR1 "$job"' TERM

job=$(flux submit "${options[@]}" @command@) || exit
flux job attach "$job" &
attached=$!
# the limit is that of the whole allocation: a clock tells the ranks some minutes before
(sleep @seconds_to_margin@ && kill -USR1 $$) &
clock=$!
wait "$attached"
status=$?
# a trap ends wait, not the job
while [[ $told ]]; do
    told=''
    wait "$attached"
    status=$?
done
pkill -P "$clock"

starts=${HPCPAR_STARTS:-1}
if ((status == @requeue_status@)) && [[ -z $ended ]] && ((starts <= @restarts@)); then
    echo "saved; back into the queue after start $starts"
    HPCPAR_STARTS=$((starts + 1)) flux --parent batch @script@ || echo "go on with: flux batch" @script@
fi
exit "$status"
