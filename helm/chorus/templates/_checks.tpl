{{/*
Names and places that would meet, or that the API would refuse in the middle of an installation. Server-side apply takes
no list with the same name twice; elsewhere the last one would win without a word.
*/}}
{{- define "chorus.checkParts" -}}
{{- $name := include "chorus.fullname" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- fail (printf "%s cannot be a Service's name, which begins with a letter and has no dots: set fullnameOverride" $name) }}
{{- end }}
{{- range $port := compact (list .Values.monitoring.port) }}
{{- if has (int $port) (list (int $.Values.server.port) (int $.Values.service.port)) }}
{{- fail (printf "monitoring.port is %d, which is server.port or service.port too" (int $port)) }}
{{- end }}
{{- end }}
{{- $variables := include "chorus.serverEnv" . | fromYamlArray }}
{{- include "chorus.unique" (dict "what" "extraEnv" "key" "name" "own" $variables "more" .Values.extraEnv) }}
{{- $volumes := include "chorus.serverVolumes" . | fromYamlArray }}
{{- include "chorus.unique" (dict "what" "extraVolumes" "key" "name" "own" $volumes "more" .Values.extraVolumes) }}
{{- $mounts := include "chorus.serverMounts" . | fromYamlArray }}
{{- include "chorus.unique" (dict "what" "the server's mounts" "key" "mountPath" "own" $mounts "more" .Values.extraVolumeMounts) }}
{{- $names := list (dict "name" "chorus") }}
{{- if include "chorus.hasDownload" . }}{{ $names = append $names (dict "name" "download") }}{{ end }}
{{- include "chorus.unique" (dict "what" "extraInitContainers" "key" "name" "own" $names "more" .Values.extraInitContainers) }}
{{- $there := list }}
{{- range concat $volumes (.Values.extraVolumes | default list) }}
{{- $there = append $there .name }}
{{- end }}
{{- range .Values.extraVolumeMounts }}
{{- if not (has .name $there) }}
{{- fail (printf "extraVolumeMounts has %s, which is no volume of the pod" .name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* what: which values to blame. key: of the elements of both lists, each of whose values may come once. */}}
{{- define "chorus.unique" -}}
{{- $seen := dict }}
{{- range concat .own (.more | default list) }}
{{- $value := get . $.key | toString | trimSuffix "/" }}
{{- if hasKey $seen $value }}
{{- fail (printf "%s: %s comes twice, or once beside the chart's own" $.what $value) }}
{{- end }}
{{- $_ := set $seen $value true }}
{{- end }}
{{- end }}

{{/* A value that the chosen engine has no use for ends the server's start (service/engine_settings.py): too late. */}}
{{- define "chorus.checkEngine" -}}
{{- $engine := .Values.engine }}
{{- range $name, $value := $engine.vllm }}
{{- if and (ne $engine.type "vllm") (include "chorus.settingValue" $value) }}
{{- fail (printf "engine.vllm.%s needs engine.type: vllm" $name) }}
{{- end }}
{{- end }}
{{- range $name, $value := omit $engine.upstream "apiKeySecret" }}
{{- if and (ne $engine.type "upstream") (include "chorus.settingValue" $value) }}
{{- fail (printf "engine.upstream.%s needs engine.type: upstream" $name) }}
{{- end }}
{{- end }}
{{- $vllm := $engine.vllm }}
{{- $parts := mul (int (default 1 $vllm.tensorParallelSize)) (int (default 1 $vllm.pipelineParallelSize)) (int (default 1 $vllm.dataParallelSize)) }}
{{- $gpus := mul (int .Values.cuda.count) (int (default 1 $vllm.nnodes)) }}
{{- if and (eq .Values.device "cuda") (gt $parts $gpus) }}
{{- fail (printf "engine.vllm spreads the model over %d GPUs, and there are %d: cuda.count for each of engine.vllm.nnodes" $parts $gpus) }}
{{- end }}
{{- $useless := dict "vllm" (list "runner" "numSpeculativeTokens" "numThreads") "upstream" (list "embeddingModel" "servedEmbeddingModelName") }}
{{- range get $useless $engine.type | default list }}
{{- if include "chorus.settingValue" (get $engine .) }}
{{- fail (printf "engine.%s means nothing to engine.type: %s" . $engine.type) }}
{{- end }}
{{- end }}
{{- end }}
