import io.fabric8.kubernetes.client.utils.Serialization;
import io.strimzi.api.kafka.model.kafka.Kafka;
import io.strimzi.operator.cluster.ClusterOperatorConfig;
import io.strimzi.operator.cluster.model.DefaultSharedEnvironmentProvider;
import io.strimzi.operator.cluster.model.EntityOperator;
import io.strimzi.operator.cluster.model.securityprofiles.PodSecurityProviderFactory;
import io.strimzi.operator.common.Reconciliation;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;

/** Writes the Deployment that Strimzi's operator creates from the Kafka in the first file to the second file. */
class EntityOperatorDeployment {
    public static void main(String[] files) throws Exception {
        PodSecurityProviderFactory.initialize();
        var kafka = Serialization.unmarshal(Files.readString(Path.of(files[0])), Kafka.class);
        var meta = kafka.getMetadata();
        var reconciliation = new Reconciliation("test", "Kafka", meta.getNamespace(), meta.getName());
        var config = ClusterOperatorConfig.buildFromMap(System.getenv());
        var model = EntityOperator.fromCrd(reconciliation, kafka, new DefaultSharedEnvironmentProvider(), config);
        var deployment = model.generateDeployment(Map.of(), false, null, List.of());
        Files.writeString(Path.of(files[1]), Serialization.asJson(deployment));
    }
}
