#!/usr/bin/env bash
# jobs/unet3d-brain.toml on 4 node(s) with 8 rank(s) each, by hpcpar submit.
# Template: flux
#
# Before its time limit the job saves a checkpoint and submits this script again; the next job goes on from there.
#flux: --job-name=unet3d-brain
#flux: --nodes=4
#flux: --exclusive
#flux: --time-limit=60m
#flux: --output=unet3d-brain.{{id}}.log

cd . || exit

options=(
    --nodes=4
    --tasks-per-node=8
)
told='' ended=''
trap 'told=1; flux job kill --signal=SIGUSR1 "$job"' USR1
# Who cancels a job does not want it back: its ranks save, and that is all.
trap 'told=1 ended=1; flux job kill --signal=SIGUSR1 "$job"' TERM

job=$(flux submit "${options[@]}" hpcpar train jobs/unet3d-brain.toml --resume auto) || exit
flux job attach "$job" &
attached=$!
# the limit is that of the whole allocation: a clock tells the ranks some minutes before
(sleep 3300 && kill -USR1 $$) &
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
if ((status == 75)) && [[ -z $ended ]] && ((starts <= 100)); then
    echo "saved; back into the queue after start $starts"
    HPCPAR_STARTS=$((starts + 1)) flux --parent batch jobs/flux/many-nodes.flux || echo "go on with: flux batch" jobs/flux/many-nodes.flux
fi
exit "$status"
