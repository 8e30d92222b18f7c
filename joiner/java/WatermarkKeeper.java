package roostream;

import java.util.List;
import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.metrics.Gauge;
import org.apache.flink.runtime.state.StateInitializationContext;
import org.apache.flink.runtime.state.StateSnapshotContext;
import org.apache.flink.streaming.api.operators.AbstractStreamOperator;
import org.apache.flink.streaming.api.operators.OneInputStreamOperator;
import org.apache.flink.streaming.api.watermark.Watermark;
import org.apache.flink.streaming.runtime.streamrecord.StreamRecord;
import org.apache.flink.streaming.runtime.watermarkstatus.WatermarkStatus;
import org.apache.flink.types.Row;

/**
 * Keeps the watermark of the join from going back, in the same operator chain. After a restore Flink starts at MIN_VALUE, and
 * events of requests that the join has forgotten would count as new. This operator stores the watermark in its state and emits
 * it before the first record after a restore.
 *
 * <p>It also passes large steps of the watermark on in slices (WatermarkSlices), stores the join's rules, and reports when a job
 * continues the state of a job with other rules. It stores the ids of the event topics, and refuses state whose offsets are of other
 * topics. For the join, which has no operator state in Python, it stores how many requests the subtask holds (RequestCounts).
 */
public final class WatermarkKeeper extends AbstractStreamOperator<Row> implements OneInputStreamOperator<Row, Row> {
    private static final long serialVersionUID = 4L;
    private final String rules;
    private final String topics;
    private transient ListState<Long> storedWatermark;
    private transient ListState<String> storedRules;
    private transient ListState<String> storedTopics;
    private transient ListState<long[]> storedCounts;
    private transient RequestCounts counts;
    private transient WatermarkSlices slices;
    private transient boolean isRestoredEmitted;
    private transient boolean isScheduled;

    /** The rules are only compared and logged. `topics` contains the name and the id of each event topic. */
    public WatermarkKeeper(String rules, String topics) {
        this.rules = rules;
        this.topics = topics;
    }

    @Override
    public void initializeState(StateInitializationContext context) throws Exception {
        super.initializeState(context);
        storedTopics = context.getOperatorStateStore().getUnionListState(new ListStateDescriptor<>("topics", String.class));
        for (String before : storedTopics.get()) { // none in state of an older version
            if (!before.equals(topics)) {
                throw new IllegalStateException("the restored offsets are of the topics " + before + ", got " + topics
                    + ": they were created again, or this is another cluster. Restore the old broker's data, or start a job without "
                    + "this restore point to join all records of the present topics");
            }
        }
        // Union state: every subtask needs the watermark after a change of parallelism. Because barriers are aligned, each subtask
        // has received every watermark that another one has emitted a part of, so the largest is right for all of them.
        storedWatermark =
            context.getOperatorStateStore().getUnionListState(new ListStateDescriptor<>("watermark", Long.class));
        slices = new WatermarkSlices();
        for (long ms : storedWatermark.get()) {
            slices.restore(ms);
        }
        isRestoredEmitted = slices.emittedMs() == WatermarkSlices.START;
        storedRules = context.getOperatorStateStore().getUnionListState(new ListStateDescriptor<>("rules", String.class));
        String before = rules;
        for (String other : storedRules.get()) {
            before = other;
        }
        int isChanged = before.equals(rules) ? 0 : 1;
        if (isChanged == 1) {
            LOG.warn("the rules of the join have changed, from {} to {}; what applies to requests that are already open: "
                + "docs/decisions/0003-join-semantics.md", before, rules);
        }
        storedCounts = context.getOperatorStateStore().getListState(new ListStateDescriptor<>("requests", long[].class));
        counts = RequestCounts.ofTask();
        for (long[] part : storedCounts.get()) { // several after a change of parallelism: only their sum has a meaning
            counts.addAll(part);
        }
        getMetricGroup().gauge("rules_changed", (Gauge<Integer>) () -> isChanged);
        WatermarkSlices ours = slices;
        getMetricGroup().gauge("watermark_pending_ms", (Gauge<Long>) ours::pendingMs);
        for (int phase = 0; phase < RequestCounts.PHASES.length; phase++) {
            int index = phase;
            RequestCounts found = counts;
            getMetricGroup().gauge("requests_" + RequestCounts.PHASES[phase], (Gauge<Long>) () -> found.get(index));
        }
    }

    @Override
    public void snapshotState(StateSnapshotContext context) throws Exception {
        super.snapshotState(context);
        storedWatermark.update(List.of(slices.emittedMs()));
        storedRules.update(List.of(rules));
        storedTopics.update(List.of(topics));
        storedCounts.update(List.of(counts.toArray()));
    }

    @Override
    public void processElement(StreamRecord<Row> record) throws Exception {
        emitRestored();
        output.collect(record);
    }

    @Override
    public void processWatermark(Watermark mark) throws Exception {
        emitRestored();
        slices.advance(mark.getTimestamp());
        if (mark.getTimestamp() == WatermarkSlices.END) {
            super.processWatermark(mark);
        } else if (!isScheduled && slices.hasNext()) {
            emitSlice();
        }
    }

    @Override
    public void processWatermarkStatus(WatermarkStatus status) throws Exception {
        emitRestored();
        super.processWatermarkStatus(status);
    }

    /** The others follow as tasks of their own, so that records and barriers pass in between. */
    private void emitSlice() throws Exception {
        super.processWatermark(new Watermark(slices.next()));
        if (slices.hasNext()) {
            isScheduled = true;
            long nowMs = getProcessingTimeService().getCurrentProcessingTime();
            getProcessingTimeService().registerTimer(nowMs, time -> {
                isScheduled = false;
                if (slices.hasNext()) {
                    emitSlice();
                }
            });
        }
    }

    private void emitRestored() throws Exception {
        if (!isRestoredEmitted) {
            isRestoredEmitted = true;
            super.processWatermark(new Watermark(slices.emittedMs()));
        }
    }
}
